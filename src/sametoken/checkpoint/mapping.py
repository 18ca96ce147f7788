"""Place of each tensor of a Hugging Face checkpoint in the decoder: a table, and its lookups.

The table covers all supported families, with separate or fused (Phi-3) projections, with and without `model.`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sametoken.model.expert_config import ExpertConfig
from sametoken.model.latent_config import LatentConfig

# Stored module -> module of the decoder, and the name of its piece if several stored modules are fused there.
# `N` stands for an index, of the block or of an expert; the fused form of a name comes before its parts.
TABLE: dict[str, tuple[str, str | None]] = {
    "embed_tokens": ("embed", None),
    "layers.N.input_layernorm": ("blocks.N.attention_norm", None),
    "layers.N.self_attn": ("blocks.N", None),  # its own tensor: the sinks of gpt-oss
    "layers.N.self_attn.qkv_proj": ("blocks.N.qkv", None),
    "layers.N.self_attn.q_proj": ("blocks.N.qkv", "q"),
    "layers.N.self_attn.k_proj": ("blocks.N.qkv", "k"),
    "layers.N.self_attn.v_proj": ("blocks.N.qkv", "v"),
    "layers.N.self_attn.q_a_proj": ("blocks.N.latent.q_down", None),
    "layers.N.self_attn.q_a_layernorm": ("blocks.N.latent.q_norm", None),
    "layers.N.self_attn.q_b_proj": ("blocks.N.latent.q", None),
    "layers.N.self_attn.kv_a_proj_with_mqa": ("blocks.N.latent.kv_down", None),
    "layers.N.self_attn.kv_a_layernorm": ("blocks.N.latent.kv_norm", None),
    "layers.N.self_attn.kv_b_proj": ("blocks.N.latent.up", None),
    "layers.N.self_attn.q_norm": ("blocks.N.q_norm", None),
    "layers.N.self_attn.k_norm": ("blocks.N.k_norm", None),
    "layers.N.self_attn.o_proj": ("blocks.N.out", None),
    "layers.N.post_self_attn_layernorm": ("blocks.N.attention_out_norm", None),
    "layers.N.post_attention_layernorm": ("blocks.N.mlp_norm", None),
    "layers.N.mlp.gate_up_proj": ("blocks.N.gate_up", None),
    "layers.N.mlp.gate_proj": ("blocks.N.gate_up", "gate"),
    "layers.N.mlp.up_proj": ("blocks.N.gate_up", "up"),
    "layers.N.mlp.down_proj": ("blocks.N.down", None),
    "layers.N.post_mlp_layernorm": ("blocks.N.mlp_out_norm", None),
    "layers.N.mlp": ("blocks.N.experts", None),  # its own tensor: the bias by which experts are chosen
    "layers.N.mlp.gate": ("blocks.N.experts.router", "router"),
    "layers.N.mlp.experts.N.gate_up_proj": ("blocks.N.experts.each.N.gate_up", None),
    "layers.N.mlp.experts.N.gate_proj": ("blocks.N.experts.each.N.gate_up", "expert gate"),
    "layers.N.mlp.experts.N.up_proj": ("blocks.N.experts.each.N.gate_up", "expert up"),
    "layers.N.mlp.experts.N.down_proj": ("blocks.N.experts.each.N.down", None),
    "layers.N.mlp.shared_expert.gate_proj": ("blocks.N.experts.shared.gate_up", "shared gate"),
    "layers.N.mlp.shared_expert.up_proj": ("blocks.N.experts.shared.gate_up", "shared up"),
    "layers.N.mlp.shared_expert.down_proj": ("blocks.N.experts.shared.down", None),
    "layers.N.mlp.shared_expert_gate": ("blocks.N.experts.router", "shared router"),
    "norm": ("norm", None),
    "lm_head": ("head", None),
}

# In the table, norms after attention and after the MLP have GLM-4's names. In OLMo 2 (no norms before them) and Gemma
# (other names for those), `post_attention_layernorm` is the norm after attention.
_OLMO = {
    ".post_attention_layernorm.": ".post_self_attn_layernorm.",
    ".post_feedforward_layernorm.": ".post_mlp_layernorm.",
}
# Sigmoid routing: a bias that affects only the choice of experts, and all shared experts as one MLP.
_SHARED = {".mlp.gate.e_score_correction_bias": ".mlp.choice_bias", ".mlp.shared_experts.": ".mlp.shared_expert."}
_GEMMA = {**_OLMO, ".pre_feedforward_layernorm.": ".post_attention_layernorm."}

# Parts of names in the files of a family -> parts of names in TABLE; replaced in this order, in reverse when written.
SPELLINGS: dict[str, dict[str, str]] = {
    "deepseek_v2": _SHARED,
    "deepseek_v3": _SHARED,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "glm4_moe": _SHARED,
    "gpt_oss": {".mlp.router.": ".mlp.gate."},
    "llama4_text": {".feed_forward.": ".mlp.", ".mlp.router.": ".mlp.gate."},
    "mixtral": {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."},
}

# Prefixes of the names of a decoder's tensors, the longest first; models that read images nest the decoder.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
IMAGES = re.compile(r"(model\.)?(vision_tower|vision_model|multi_modal_projector|visual)\..*")

# Parts of decoder names whose projections are stored fused, by family.
FUSED = {
    "glm": (".gate_up.",), "glm4": (".gate_up.",), "gpt_oss": (".experts.",), "llama4_text": (".each.",), "phi3": (".",)
}  # fmt: skip

# Prefixes of the text part's names in families with images, if other than PREFIXES[0].
OUTSIDE = {"llama4_text": "language_model.model."}

# Buffers that older exporters stored with the weights; their values follow from config.json.
DERIVED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

# Blocks after the decoder's own: those of MiMo have numbers of their own.
FURTHER = re.compile(r"model\.(?:layers\.(\d+)|mtp_layers\.\d+)\.")

# Names of a draft's heads that Model-Optimizer stores in the checkpoint of the target.
HEADS = "medusa_heads."

_INDEX = re.compile(r"\b\d+\b")


class Shapes(Protocol):
    """Values of a `ModelConfig` that determine the names of tensors and the rows of fused ones."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def architecture(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def experts(self) -> ExpertConfig | None: ...
    @property
    def latent(self) -> LatentConfig | None: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def further_layers(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


class ParameterRows(NamedTuple):
    """Rows of a parameter of the decoder that one stored tensor fills.

    Attributes:
        parameter: name of the parameter.
        rows: rows that are filled; None for all.
    """

    parameter: str
    rows: range | None


class Places(Protocol):
    """Places of stored tensors; `DecoderRules` for a decoder, other classes for heads."""

    def ignores(self, name: str) -> bool:
        """True for a stored tensor that needs no place."""
        ...

    def place(self, name: str) -> ParameterRows | None:
        """Place of a stored tensor; None without one."""
        ...

    def sources(self, parameter: str, taken: Sequence[range]) -> list[str]:
        """Names of the stored tensors for the rows of a parameter that are not `taken`, for an error message."""
        ...


class SameNames:
    """Places of tensors that are stored under the names of the parameters."""

    def ignores(self, name: str) -> bool:
        return False

    def place(self, name: str) -> ParameterRows | None:
        return ParameterRows(name, None)

    def sources(self, parameter: str, taken: Sequence[range]) -> list[str]:
        return [parameter]


@dataclass(frozen=True)
class DecoderRules:
    """Places of the tensors of one decoder: TABLE, with the names and shapes of its model.

    Attributes:
        rows: rows of each piece within its fused tensor.
        tied: true if the output head is the embedding; a stored head is then ignored.
        spellings: parts of names in the files -> parts of names in TABLE.
        fused: parts of decoder names whose pieces are stored fused.
        prefix: prefix of the names in the files, as transformers writes them.
        images: true if the files also hold a part that reads images, which is ignored.
        further: numbers of the blocks after the decoder's own, which are ignored.
    """

    rows: Mapping[str, range]
    tied: bool
    spellings: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[str, ...] = ()
    prefix: str = "model."
    images: bool = False
    further: range = range(0)

    def ignores(self, name: str) -> bool:
        """True for a stored tensor that the decoder derives, shares or does not have."""
        derived = DERIVED.fullmatch(name) is not None or name.startswith(HEADS)
        unread = self.images and IMAGES.fullmatch(name) is not None
        block = FURTHER.match(name) if self.further else None
        unread |= block is not None and (block[1] is None or int(block[1]) in self.further)
        return derived or unread or (self.tied and name.removeprefix("language_model.") == "lm_head.weight")

    def place(self, name: str) -> ParameterRows | None:
        """Place of the stored tensor `name`; None if TABLE has no such tensor."""
        for stored, meant in self.spellings.items():
            name = name.replace(stored, meant)
        prefix = next((each for each in PREFIXES if name.startswith(each)), "") if self.images else "model."
        path, indices, kind = split_name(name.removeprefix(prefix))
        ours, piece = TABLE.get(path, (None, None))
        if ours is None or (piece is not None and piece not in self.rows):
            return None
        return ParameterRows(f"{filled(ours, indices)}.{kind}", self.rows[piece] if piece else None)

    def sources(self, parameter: str, taken: Sequence[range]) -> list[str]:
        """Names of the stored tensors for the rows of a parameter that are not `taken`, for an error message."""
        path, indices, kind = split_name(parameter)
        stored = [(name, piece) for name, (ours, piece) in self._table() if ours == path]
        names = [name for name, piece in stored if piece and self.rows[piece] not in taken] if taken else [stored[0][0]]
        hint = " or its parts" if not taken and len(stored) > 1 else ""
        return [f"{self._written(name, indices, kind)}{hint}" for name in names]

    def stored(self, parameter: str) -> list[tuple[str, range | None]]:
        """Names under which transformers stores a parameter, each with its rows; None for all rows."""
        fused = any(part in parameter for part in self.fused)
        path, indices, kind = split_name(parameter)
        found = [(name, piece) for name, (ours, piece) in self._table() if ours == path]
        wanted = [(name, piece) for name, piece in found if (piece is None) == fused] or found
        return [(self._written(name, indices, kind), self.rows[piece] if piece else None) for name, piece in wanted]

    def _table(self) -> list[tuple[str, tuple[str, str | None]]]:
        """Lines of TABLE whose pieces this model has."""
        return [(name, place) for name, place in TABLE.items() if place[1] is None or place[1] in self.rows]

    def _written(self, path: str, indices: Sequence[str], kind: str) -> str:
        """Name of a tensor in the files, from its path in TABLE."""
        prefix = self.prefix
        if path == "lm_head":
            prefix = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
        name = f"{prefix}{filled(path, indices)}.{kind}"
        for stored, meant in reversed(list(self.spellings.items())):
            name = name.replace(meant, stored)
        return name


def split_name(name: str) -> tuple[str, tuple[str, ...], str]:
    """Split the name of a tensor into module with N for each index, indices, and weight or bias."""
    path, _, kind = name.rpartition(".")
    return _INDEX.sub("N", path), tuple(_INDEX.findall(path)), kind


def filled(path: str, indices: Sequence[str]) -> str:
    """Name of a module with its indices in place of N."""
    for index in indices:
        path = path.replace("N", index, 1)
    return path


def rules_for(config: Shapes) -> DecoderRules:
    """Places of the tensors of one model; in fused tensors, q, k, v and gate, up follow each other."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = config.intermediate_size
    rows = {
        "q": range(query),
        "k": range(query, query + key),
        "v": range(query + key, query + 2 * key),
        "gate": range(width),
        "up": range(width, 2 * width),
    }
    if config.experts is not None:
        count, outputs = config.experts.count, config.experts.router_outputs
        rows |= {"router": range(count)} | ({"shared router": range(count, outputs)} if outputs > count else {})
        for name, size in (("expert", config.experts.width), ("shared", config.experts.shared)):
            rows |= {f"{name} gate": range(size), f"{name} up": range(size, 2 * size)}
    images = config.architecture.endswith("ForConditionalGeneration")
    spellings = SPELLINGS.get(config.family, {})
    if config.latent is not None and config.latent.query_rank is None:
        spellings = {**spellings, ".self_attn.q_proj.": ".self_attn.q_b_proj."}
    further = range(config.num_layers, config.num_layers + config.further_layers)
    return DecoderRules(
        rows, config.tie_word_embeddings, spellings, FUSED.get(config.family, ()),
        OUTSIDE.get(config.family, PREFIXES[0]) if images else "model.", images, further,
    )  # fmt: skip

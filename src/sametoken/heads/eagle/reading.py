"""Configuration of an EAGLE head from config.json and its tensors, for every producer, with the assumptions made.

A part is present if its tensor is; a contradicting flag of config.json is an error. Flags without a tensor
(`norm_before_residual`, `norm_output`) are read as vLLM and SGLang read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sametoken.checkpoint.contents import architectures
from sametoken.checkpoint.quantised.scheme import KEYS
from sametoken.errors import CheckpointError, DraftMismatchError, UnsupportedModelError
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.names import INSIDE, plain_name
from sametoken.heads.files import Files, mapping
from sametoken.kinds import OURS
from sametoken.model.config import ModelConfig
from sametoken.model.keys import MOST_WINDOW, Keys
from sametoken.model.window_config import check_layer_types

NEWER_NAMES = ("Eagle3", "EAGLE3")
EAGLE_1_NAMES = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "EagleForCausalLM", "EagleModel")


class EagleReader(ABC):
    """Reader of the configuration of one EAGLE head; subclasses implement the differences of the versions."""

    version: int
    built: str  # difference of this version's tensors from the other's, for an error

    def __init__(self, files: Files, target: ModelConfig) -> None:
        self.files, self.target, self.notes = files, target, list[str]()
        self.shapes = {plain_name(name): seen.shape for name, seen in files.seen.items()}
        self.eagle = mapping(files.config.get("eagle_config"))
        self.producer = producer_of(files)

    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """Fields of `EagleConfig` that the versions read differently."""

    @abstractmethod
    def draft_vocabulary(self, rows: int) -> int:
        """Number of tokens that the head can guess, from the rows of its output layer."""

    @abstractmethod
    def fused(self, width: int) -> tuple[bool, str]:
        """Check the number of inputs of `fc`: return true if it fits, and the expected numbers."""

    def narrow(self) -> bool:
        """True if the head's width may differ from the target's."""
        return False

    def config(self) -> EagleConfig:
        """Configuration of the head; adds the assumptions made to `notes`."""
        self._refuse()
        self._check_declared()
        layers = self._layers()
        wide = self.target.hidden_size
        self._check_width(layers.hidden_size, wide)
        config = EagleConfig(
            layers=layers,
            version=self.version,
            target_hidden_size=wide,
            draft_vocab_size=self._draft_vocabulary(),
            own_embed=self.has("embed_tokens"),
            own_head=self.has("lm_head"),
            **self.parts(),
        )
        if config.norm_output and self.producer == "SpecForge":
            self.notes.append("SpecForge trains norm_output without feeding the normed state back, engines do feed it")
        if layers.num_layers > 1 and self.eagle.get("next_layer_regular") is False:
            raise UnsupportedModelError(
                f"{self.files.where}: eagle_config.next_layer_regular is false; supported: regular further layers"
            )
        return config

    def _check_width(self, hidden: int, wide: int) -> None:
        """Raise if the head was made for hidden states of another size."""
        stated = self.files.config.get("target_hidden_size")
        if stated not in (None, wide) or (hidden != wide and not self.narrow()):
            found = hidden if stated in (None, wide) else stated
            raise DraftMismatchError(
                f"{self.files.where}: made for hidden states of size {found}, the "
                f"target's have {wide}; it was trained beside another model"
            )
        fits, expected = self.fused(self.fc_width)
        if not fits:
            raise DraftMismatchError(
                f"{self.files.where}: fc reads {self.fc_width} numbers, expected {expected}, the target's hidden size "
                f"being {wide}"
            )

    def has(self, module: str) -> bool:
        return f"{module}.weight" in self.shapes

    def flag(self, name: str, *aliases: str) -> bool | None:
        """Flag from the top level of config.json or from its `eagle_config`, None if neither has it."""
        values = {
            Keys(where, f"{self.files.where}: config.json").flag(key, False)
            for where in (self.files.config, self.eagle)
            for key in (name, *aliases)
            if where.get(key) is not None
        }
        if len(values) > 1:
            raise CheckpointError(f"{self.files.where}: config.json has both true and false for {name!r}")
        return next(iter(values), None)

    def part(self, tensor: str, name: str | None) -> bool:
        """True if a part is present; raise if config.json contradicts it."""
        present, stated = tensor in self.shapes, self.flag(name) if name else None
        if stated is not None and stated != present:
            raise CheckpointError(
                f"{self.files.where}: config.json has {name} = {str(stated).lower()}, but {tensor} is "
                f"{'there' if present else 'missing'}; the files are incomplete or belong to different heads"
            )
        return present

    def _refuse(self) -> None:
        where = self.files.where
        if "mask_hidden" in self.shapes or self.flag("parallel_drafting"):
            raise UnsupportedModelError(f"{where}: a head that guesses in parallel (P-EAGLE) is not supported")
        if any(name.startswith(INSIDE) for name in self.files.seen):
            raise UnsupportedModelError(
                f"{where}: a training checkpoint of Model-Optimizer with the whole model; export the head there "
                "(export_hf_checkpoint.py) and give the result"
            )

    def _check_declared(self) -> None:
        """Raise if config.json declares another version than the tensors have."""
        declared, why = _declared(self.files.config)
        if declared not in (None, self.version):
            raise DraftMismatchError(
                f"{self.files.where}: config.json declares EAGLE-{declared} ({why}), but the weights {self.built}; "
                f"correct config.json, or serve the head as EAGLE-{self.version}"
            )

    def _layers(self) -> ModelConfig:
        """Configuration of the draft's own blocks, with special tokens and positions of the target."""
        where, outer = self.files.where, self.files.config
        stated = outer.get("transformer_layer_config", outer)
        if not isinstance(stated, Mapping):
            raise CheckpointError(f"{where}: transformer_layer_config is {stated!r}, expected an object")
        vocabulary = stated.get("vocab_size")
        if vocabulary not in (None, self.target.vocab_size):
            raise DraftMismatchError(
                f"{where}: made for a vocabulary of {vocabulary}, the target's has {self.target.vocab_size}; it was "
                "trained beside another model"
            )
        family = "Qwen3ForCausalLM" if stated.get("model_type") == "qwen3" else "LlamaForCausalLM"
        count = self._count(stated)
        facts = {
            **{key: value for key, value in stated.items() if stated is not outer or key not in KEYS},
            "architectures": [family], "num_hidden_layers": count,
            "vocab_size": self.target.vocab_size,
            "layer_types": None, "sliding_window": None,
        }  # fmt: skip
        if outer.get("torch_dtype") or outer.get("dtype"):
            facts["dtype"] = outer.get("dtype") or outer.get("torch_dtype")
        try:
            plain = ModelConfig.from_hf(facts)
        except CheckpointError as error:
            raise type(error)(f"{where}: {error}") from error
        self._note_rope(stated, plain)
        biased = stated.get("qkv_bias", stated.get("attention_bias"))
        return replace(
            plain,
            architecture="LlamaForCausalLM",
            family="llama",
            qkv_bias=self.part_of_blocks("self_attn.q_proj.bias", biased),
            out_bias=self.part_of_blocks("self_attn.o_proj.bias"),
            mlp_bias=self.part_of_blocks("mlp.gate_proj.bias", stated.get("mlp_bias")),
            qk_norm=self.part_of_blocks("self_attn.q_norm.weight"),
            sliding_windows=_windows(stated, count, where),
            tie_word_embeddings=False,
            max_position=self.target.max_position,
            eos_token_ids=self.target.eos_token_ids,
            bos_token_id=self.target.bos_token_id,
        )

    def part_of_blocks(self, tensor: str, asked: Any = None) -> bool:
        """True if the blocks have a part; raise if it is missing although config.json requires it."""
        present = f"layers.0.{tensor}" in self.shapes
        if asked is True and not present:
            raise CheckpointError(
                f"{self.files.where}: config.json asks for layers.0.{tensor}, which is missing; the files are "
                "incomplete or belong to different heads"
            )
        return present

    def _count(self, stated: Mapping[str, Any]) -> int:
        """Number of blocks; 1 for a single `midlayer`, even if config.json has the target's number."""
        asked = Keys(stated, f"{self.files.where}: config.json").integer("num_hidden_layers", 1)
        if any(name.removeprefix("model.").startswith("midlayer.") for name in self.files.seen) and not any(
            name.startswith("layers.1.") for name in self.shapes
        ):
            if asked != 1:
                self.notes.append(f"config.json has {asked} layers, the weights have one, which is used")
            return 1
        return asked

    @property
    def fc_width(self) -> int:
        """Input width of `fc`."""
        shape = self.shapes["fc.weight"]
        if len(shape) != 2:
            raise CheckpointError(f"{self.files.where}: fc.weight has shape {list(shape)}, expected two dimensions")
        return shape[1]

    def _draft_vocabulary(self) -> int:
        """Number of tokens that the head can guess."""
        rows = self.shapes["lm_head.weight"][0] if self.has("lm_head") else self.target.vocab_size
        size = self.draft_vocabulary(rows)
        if size > self.target.vocab_size:
            raise DraftMismatchError(
                f"{self.files.where}: it guesses among {size} tokens, the target has {self.target.vocab_size}; it was "
                "trained beside another model"
            )
        if size < self.target.vocab_size and "d2t" not in self.shapes:
            raise CheckpointError(
                f"{self.files.where}: it guesses among {size} of the target's {self.target.vocab_size} tokens, but has "
                "no d2t to say which; add the tensor (some trainers leave it in a file of its own)"
            )
        return size

    def _note_rope(self, stated: Mapping[str, Any], plain: ModelConfig) -> None:
        inner = mapping(stated.get("rope_parameters") or stated.get("rope_scaling"))
        theta = stated.get("rope_theta", inner.get("rope_theta"))
        if theta is None and self.target.rope.theta != plain.rope.theta:
            self.notes.append(
                f"no rope_theta in config.json: {plain.rope.theta:g} (the target's own is {self.target.rope.theta:g})"
            )
        if self.producer == "ModelOpt" and plain.rope.kind == "yarn":
            self.notes.append("ModelOpt writes YaRN scaling at export, whatever the head was trained with")


def _declared(config: Mapping[str, Any]) -> tuple[int | None, str]:
    """Version that config.json declares, and the key that declares it."""
    ours = mapping(config.get(OURS))
    if ours.get("version") is not None:
        return (1 if ours["version"] == 1 else 3), f"sametoken.version = {ours['version']}"
    names = architectures(config)
    if any(word in name for name in names for word in NEWER_NAMES):
        return 3, f"architectures = {names}"
    if config.get("draft_vocab_size") is not None:
        return 3, "it has draft_vocab_size"
    if any(name in EAGLE_1_NAMES for name in names) or config.get("model_type") == "eagle":
        return 1, f"architectures = {names}"
    return None, ""


def producer_of(files: Files) -> str:
    """Name of the tool that has probably written a head."""
    config = files.config
    names = architectures(config)
    if OURS in config:
        return "sametoken"
    if "speculators_config" in config or "speculators_model_type" in config:
        return "speculators"
    if "use_aux_hidden_state" in mapping(config.get("eagle_config")):
        return "ModelOpt"
    if any("Eagle3" in name for name in names):
        return "SpecForge"
    return "SafeAILab"


def _windows(stated: Mapping[str, Any], count: int, where: Path) -> tuple[int | None, ...]:
    """Window of each block in tokens; None for layers that are not declared as sliding."""
    keys = Keys(stated, f"{where}: config.json")
    types = stated.get("layer_types")
    default = "sliding_attention" if keys.flag("use_sliding_window", False) else "full_attention"
    kinds = [default] * count if types is None else types
    check_layer_types(kinds, count, f"{where}: config.json")
    window = keys.integer("sliding_window", most=MOST_WINDOW) if "sliding_attention" in kinds else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

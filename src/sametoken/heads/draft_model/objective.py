"""Training of a draft model (a new small Llama, or an existing model) on the distributions of a target.

The loss is the divergence from the target on the target's text. In on-policy training (DistillSpec, arXiv 2310.08461),
the draft generates a part of the answers and learns the target's distribution on them. Legend: N tokens of a batch,
H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sametoken.checkpoint.fill import load_parameters
from sametoken.checkpoint.hub import read_config
from sametoken.checkpoint.load import decoder_weights
from sametoken.checkpoint.mapping import rules_for
from sametoken.checkpoint.paths import read_keys
from sametoken.checkpoint.places import draft_directory
from sametoken.checkpoint.write import write_model
from sametoken.errors import ConfigError, DraftMismatchError, UnsupportedModelError, unknown_name
from sametoken.heads.draft_model.on_policy import rewrite
from sametoken.learning.attention import UnrolledAttention
from sametoken.learning.batch import Batch
from sametoken.learning.loss import AcceptanceMetrics, Teacher, guess_loss
from sametoken.learning.objective import STD, Objective, Start, computing_in
from sametoken.learning.target import Features, OuterLayers
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder

# Keys of the sizes of a draft, named as in the config.json of a Llama.
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings", "attention_bias", "mlp_bias",
)  # fmt: skip


class TrainableDraft(NamedTuple):
    """Draft model to train.

    Attributes:
        decoder: model in float32, with unpacked linears.
        config: config.json without the dtype.
        tokenizer: directory of the target, whose tokenizer the draft uses.
    """

    decoder: Decoder
    config: Mapping[str, Any]
    tokenizer: Path


def new_draft(settings: Any, target: ModelConfig, directory: Path, device: torch.device, seed: int) -> TrainableDraft:
    """Create a draft with random weights, or with those of the model that `init_from` names.

    Args:
        target: configuration of the target in `directory`.

    Raises:
        ConfigError: a size is unknown, or the file `draft_config` does not exist.
        CheckpointError: the sizes contradict each other, or the model to start from cannot be read.
        DraftMismatchError: the model of `init_from` has another vocabulary than the target.
    """
    if settings.init_from is not None:
        return _started(settings, target, directory, device)
    config = {**_plain(target), **_sizes(settings.draft_config)}
    with torch.device(device):
        decoder = Decoder(ModelConfig.from_hf(config), torch.float32)
    random = torch.Generator(device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, STD, generator=random)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
    return TrainableDraft(decoder, config, directory)


def _plain(target: ModelConfig) -> dict[str, Any]:
    """Configuration of a Llama with half the target's width, an eighth of its blocks, its vocabulary and context."""
    whole = target.plain_heads
    kv_heads = max(1, whole["num_kv_heads"] // 2)
    heads = kv_heads * max(1, whole["num_heads"] // (2 * kv_heads))
    hidden = max(32, target.hidden_size // 2)
    eos = list(target.eos_token_ids)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position, "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "num_hidden_layers": max(1, target.num_layers // 8), "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": whole["head_dim"], "hidden_act": "silu",
        "rms_norm_eps": target.norm_eps, "rope_theta": target.rope.theta, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": target.bos_token_id,
        "eos_token_id": eos if len(eos) != 1 else eos[0],
    }  # fmt: skip
    return config if eos else {**config, "eos_token_id": None}


def _sizes(file: str | None) -> dict[str, Any]:
    """Sizes from a JSON file."""
    found = read_keys("--draft-config", file)
    if unknown := [key for key in found if key not in SIZES]:
        raise ConfigError(f"--draft-config {file}: {unknown_name('key', unknown[0], SIZES)}")
    return found


def _started(settings: Any, target: ModelConfig, directory: Path, device: torch.device) -> TrainableDraft:
    place = draft_directory(str(settings.init_from))
    stated = read_config(place)
    config = ModelConfig.from_hf(stated)
    if config.attention_cap is not None or config.logits_cap is not None:
        raise UnsupportedModelError(
            f"--init-from {place}: a {config.family} model caps its scores, which is not trained here; expected a "
            "model without 'attn_logit_softcapping' and 'final_logit_softcapping'"
        )
    if not config.usual_attention:
        raise UnsupportedModelError(
            f"--init-from {place}: a {config.family} model has sinks in its attention, or attends in chunks, which is "
            "not trained here; use a model of another family"
        )
    if config.vocab_size != target.vocab_size:
        raise DraftMismatchError(
            f"--init-from {place} has {config.vocab_size} tokens, expected the target's {target.vocab_size}"
        )
    with torch.device("meta"):
        decoder = Decoder(config, torch.float32)
    load_parameters(decoder, decoder_weights(place, config), rules_for(config), torch.float32, device, pack=False)
    return TrainableDraft(decoder, stated, directory)


class DraftObjective(Objective):
    """Training objective of a draft model.

    Args:
        draft: draft to train.
    """

    steps = 1

    def __init__(
        self, draft: TrainableDraft, outer: OuterLayers, loss: Any, dtype: torch.dtype, *, recompute: bool = False
    ) -> None:
        super().__init__(outer, loss, dtype, recompute=recompute)
        self.decoder, self._draft, self._share = draft.decoder, draft, loss.on_policy
        for parameter in self.decoder.parameters():
            parameter.requires_grad_(True)

    @classmethod
    def new(cls, start: Start) -> Self:
        device = start.outer.head.device
        draft = new_draft(start.head, start.outer.config, start.directory, device, start.seed)
        return cls(draft, start.outer, start.loss, start.dtype, recompute=start.recompute)

    def forward(self, batch: Batch, features: Features, weights: Tensor) -> tuple[Tensor, AcceptanceMetrics]:
        ids = torch.arange(len(self.outer.head), device=self.outer.head.device)
        teacher = Teacher(features.last, self.outer.head, batch.ahead(1), ids, self.outer.config.logits_cap)
        decoder = self.decoder
        with computing_in(self.dtype, self.outer.head.device):
            states = self._states(batch)
            head = decoder.embed.weight if decoder.head is None else decoder.head.weight
            scale = decoder.config.logits_scale
            head = head if scale == 1 else head * scale
            # In the loss, slot j - 1 guesses about place j; a model that reads token j does so at place j.
            return guess_loss(states.roll(-1, 0).unsqueeze(0), [head], teacher, weights, self.rule)

    def _states(self, batch: Batch) -> Tensor:  # -> [N, H] after the final norm
        decoder = self.decoder
        attend = UnrolledAttention(batch.lengths, decoder.config.attention_scale)
        x = decoder.scaled(F.embedding(batch.tokens, decoder.embed.weight).to(self.dtype))
        rotations = [each and (each[0].to(x.dtype), each[1].to(x.dtype)) for each in decoder.rotations(batch.positions)]
        for block, rope in zip(decoder.blocks, rotations, strict=True):
            x = checkpoint(block, x, rope, attend, use_reentrant=False) if self.recompute else block(x, rope, attend)
        normed: Tensor = decoder.norm(x)
        return normed

    def rewritten(self, batch: Batch) -> Batch:
        if not self._share:
            return batch
        return rewrite(self.decoder, batch, self._share, self.outer.config.eos_token_ids)

    def write(self, place: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        whole = Decoder(self.decoder.config, torch.float32)
        whole.load_state_dict({name.removeprefix("decoder."): value for name, value in weights.items()})
        write_model(whole, place, self._draft.config, self._draft.tokenizer, dtype or self.stored_dtype)

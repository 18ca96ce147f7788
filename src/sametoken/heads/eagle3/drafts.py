"""EAGLE-3 and 3.1: heads that read several blocks of the target, and token and hidden state concatenated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from sametoken.errors import CheckpointError, ConfigError, DraftMismatchError
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.drafts import Eagle
from sametoken.heads.eagle.facts import facts_of
from sametoken.heads.eagle.layouts import Table
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.reading import EagleReader
from sametoken.heads.eagle3.layouts import lay_out, refusals
from sametoken.heads.eagle3.taps import Taps, read_taps
from sametoken.heads.files import Files
from sametoken.heads.kind import Described, Reading, Written
from sametoken.model.config import ModelConfig
from sametoken.model.formats.coded import Coded
from sametoken.model.keys import Keys


class Eagle3Reader(EagleReader):
    """Reader of the configuration of an EAGLE-3 head.

    Attributes:
        taps: layers that the files declare; set by `config`.
    """

    version = 3
    built = "have a hidden_norm and read token and hidden state side by side in attention, which EAGLE-1 does not"
    taps: Taps

    def parts(self) -> dict[str, Any]:
        self.taps = self._taps(self.fc_width // self.target.hidden_size)
        return {
            "taps": self.taps.layers,
            "fc_bias": self.part("fc.bias", None),
            "norm_before_residual": self._residual(),
            "norm_before_fc": self.part("input_norm.weight", "norm_before_fc"),
            "fc_norm": self.part("fc_norm.0.weight", "fc_norm"),
            "norm_output": self.flag("norm_output", "return_hidden_post_norm") is True,
            "last_norm": self._last_norm(),
        }

    def draft_vocabulary(self, rows: int) -> int:
        return Keys(self.files.config, f"{self.files.where}: config.json").integer("draft_vocab_size", rows)

    def fused(self, width: int) -> tuple[bool, str]:
        wide = self.target.hidden_size
        return bool(width) and width % wide == 0, f"a multiple of {wide}"

    def narrow(self) -> bool:
        return self.has("embed_tokens")

    def _taps(self, count: int) -> Taps:
        try:
            taps = read_taps(self.files.config, self.target, count)
        except (CheckpointError, DraftMismatchError) as error:
            raise type(error)(f"{self.files.where}: {error}") from error
        if not taps.known:
            self.notes.append(f"taps {list(taps.layers)} (outputs of blocks) are assumed: {taps.why}")
        return taps

    def _last_norm(self) -> bool:
        """True unless config.json declares that there is no last norm, so that a missing tensor is an error."""
        if "norm.weight" not in self.shapes:
            return self.flag("use_last_layernorm") is not False
        return self.part("norm.weight", "use_last_layernorm")

    def _residual(self) -> bool:
        stated = self.flag("norm_before_residual")
        if stated is None and self.producer == "speculators":
            self.notes.append("norm_before_residual is not stated: false, as in speculators (vLLM would take true)")
        return stated is True


class Eagle3(Eagle):
    """Kind of EAGLE-3 heads; 3.1 has a norm for each tap or recycles the normed state."""

    paired = True

    def describe(self, files: Files, target: ModelConfig) -> Described:
        reader = Eagle3Reader(files, target)
        config = reader.config()
        taps = reader.taps
        source = "stated" if taps.known else "assumed"
        reads = f"outputs of layers {', '.join(map(str, taps.layers))} ({source}: {taps.why})"
        readings = _readings(taps, reader.producer, target)
        return Described(config, reader.producer, tuple(reader.notes), facts_of(config, target, reads), readings)

    def lay_out(self, head: EagleHead, target: ModelConfig, layout: str, target_name: str) -> Written:
        return lay_out(head, target, layout, target_name)

    def table(self, config: EagleConfig, tensors: Mapping[str, Tensor | Coded] | None) -> Table:
        return refusals(config)

    def advice(self, config: EagleConfig, layout: str) -> tuple[str, ...]:
        if layout == "trtllm":
            layers = list(config.taps)
            return (f"serve it with decoding_type: Eagle3 and eagle3_layers_to_capture: {layers}",)
        if layout == "speculators":
            return ("vllm serve DIR finds the target by verifier.name_or_path, which must be a Hub id",)
        return super().advice(config, layout)

    def title(self, config: EagleConfig) -> str:
        return "EAGLE-3.1" if config.fc_norm or config.norm_output else "EAGLE-3"

    def with_taps(self, head: EagleHead, taps: tuple[int, ...], target: ModelConfig) -> EagleHead:
        if len(taps) != len(head.config.taps):
            raise ConfigError(f"taps {list(taps)}: expected {len(head.config.taps)} layers, which its fc reads")
        if absent := [tap for tap in taps if not 0 <= tap < target.num_layers]:
            raise ConfigError(f"taps {list(taps)}: the target has layers 0 to {target.num_layers - 1}, not {absent[0]}")
        head.config = replace(head.config, taps=taps)
        return head


def _readings(taps: Taps, producer: str, target: ModelConfig) -> tuple[Reading, ...]:
    """Chosen layers first, then those with the same ids in the other convention."""
    chosen = Reading(taps.layers, f"{taps.convention}, as read")
    if producer == "sametoken":
        return (chosen,)
    step = {"before": 1, "output": -1, "default": 1}[taps.convention]
    other = tuple(layer + step for layer in taps.layers)
    name = {"before": "if the ids named outputs", "output": "if the ids counted blocks before"}
    fits = all(0 <= layer < target.num_layers for layer in other)
    return (chosen, Reading(other, name.get(taps.convention, "one layer later")))[: 1 + fits]

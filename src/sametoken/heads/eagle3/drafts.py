"""EAGLE-3 and 3.1: heads that read several blocks of the target, and token and hidden state concatenated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from sametoken.errors import ConfigError
from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.drafts import Eagle
from sametoken.heads.eagle.facts import facts_of
from sametoken.heads.eagle.layouts import Table
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle3.layouts import lay_out, refusals
from sametoken.heads.eagle3.reading import Eagle3Reader
from sametoken.heads.eagle3.taps import Taps
from sametoken.heads.files import Files
from sametoken.heads.kind import Described, Reading, Written
from sametoken.model.config import ModelConfig
from sametoken.model.formats.coded import Coded


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

"""EAGLE-1 and EAGLE-2: heads that read the target's last hidden state, after its norm, and predict the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sametoken.heads.eagle.config import EagleConfig
from sametoken.heads.eagle.drafts import Eagle
from sametoken.heads.eagle.facts import facts_of
from sametoken.heads.eagle.layouts import Table
from sametoken.heads.eagle.module import EagleHead
from sametoken.heads.eagle.reading import EagleReader
from sametoken.heads.eagle1.layouts import config_json, refusals, stored
from sametoken.heads.files import Files
from sametoken.heads.kind import Described, Written
from sametoken.model.config import ModelConfig
from sametoken.model.formats.coded import Coded


class Eagle1(Eagle):
    """Kind of EAGLE-1 heads, with chains or EAGLE-2's trees."""

    paired = False

    def describe(self, files: Files, target: ModelConfig) -> Described:
        reader = Eagle1Reader(files, target)
        config = reader.config()
        facts = facts_of(config, target, "the target's last hidden state, after its norm")
        return Described(config, reader.producer, tuple(reader.notes), facts)

    def lay_out(self, head: EagleHead, target: ModelConfig, layout: str, target_name: str) -> Written:
        return Written(config_json(head.config, layout), stored(head, layout), "model.safetensors")

    def table(self, config: EagleConfig, tensors: Mapping[str, Tensor | Coded] | None) -> Table:
        return refusals(config, tensors)

    def title(self, config: EagleConfig) -> str:
        return "EAGLE-1 (also EAGLE-2's)"


class Eagle1Reader(EagleReader):
    """Reader of the configuration of an EAGLE-1 head."""

    version = 1
    built = "have no hidden_norm, which is how EAGLE-1 and EAGLE-2 are built"

    def parts(self) -> dict[str, Any]:
        return {
            "taps": (),
            "fc_bias": self.part("fc.bias", "bias"),
            "input_norm": self.part("layers.0.input_layernorm.weight", "use_input_layernorm_in_first_layer"),
            "last_norm": self.part("norm.weight", "use_last_layernorm"),
        }

    def draft_vocabulary(self, rows: int) -> int:
        return rows

    def fused(self, width: int) -> tuple[bool, str]:
        expected = 2 * self.target.hidden_size
        return width == expected, str(expected)

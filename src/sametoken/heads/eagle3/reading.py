"""Configuration of EAGLE-3 heads: taps, draft vocabulary, and norms that flags declare."""

from __future__ import annotations

from typing import Any

from sametoken.errors import CheckpointError, DraftMismatchError
from sametoken.heads.eagle.reading import EagleReader
from sametoken.heads.eagle3.taps import Taps, read_taps
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

"""Configuration of EAGLE heads: versions 1 and 2 (one checkpoint format), 3 and 3.1.

Taps are outputs of the target's blocks, counted from 0; files have other conventions, see `heads.eagle3.taps`.
Sources: SafeAILab/EAGLE, and the EAGLE 3.1 flags of vLLM and SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.heads.checks import check
from sametoken.model.config import ModelConfig


@dataclass(frozen=True)
class EagleConfig:
    """Configuration of an EAGLE head.

    Attributes:
        layers: blocks, RoPE, context and `hidden_size` of the draft; `vocab_size` and special tokens of the target.
        version: 1 (EAGLE-1 and EAGLE-2, one format) or 3 (3.1 has `fc_norm` and `norm_output`).
        taps: 0-based blocks of the target whose outputs the head reads, in its order; () for version 1, which reads
            the target's last hidden state after the final norm.
        target_hidden_size: width of one tap.
        draft_vocab_size: number of tokens that the head can guess; the target's vocabulary unless reduced.
        fc_bias: true if the fusion has a bias.
        norm_before_residual: version 3: the residual starts from the normed hidden state.
        norm_before_fc: version 3: one norm over all taps together, before the fusion.
        fc_norm: version 3: a norm for each tap, before the fusion.
        norm_output: version 3: the next step reads the hidden state after the last norm.
        input_norm: version 1: the first block norms its input.
        joined_norms: version 1: token embedding and hidden state have a norm each, before the fusion (MTP).
        hidden_first: version 1: the fusion reads the hidden state before the token embedding (MTP of MiMo).
        last_norm: true if there is a norm before the output head.
        own_embed: true if the head has its own token embedding; otherwise it uses the target's, of equal width.
        own_head: true if the head has its own output head; otherwise it uses the target's.
    """

    layers: ModelConfig
    version: int
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    input_norm: bool = False
    joined_norms: bool = False
    hidden_first: bool = False
    last_norm: bool = True
    own_embed: bool = False
    own_head: bool = True

    def __post_init__(self) -> None:
        check(self.version in (1, 3), "version", self.version, "1 or 3")
        if self.version == 3:
            check(bool(self.taps) and min(self.taps) >= 0, "taps", self.taps, "layers, 0-based")
            check(len(self.taps) == len(set(self.taps)), "taps", self.taps, "different layers")
        else:
            check(not self.taps, "taps", self.taps, "() for EAGLE-1, which reads the last hidden state")
        vocabulary = self.layers.vocab_size
        check(0 < self.draft_vocab_size <= vocabulary, "draft_vocab_size", self.draft_vocab_size, f"1 .. {vocabulary}")
        if not self.own_embed or self.version == 1:
            check(
                self.layers.hidden_size == self.target_hidden_size, "hidden_size", self.layers.hidden_size,
                f"the target's {self.target_hidden_size}, since the head shares its token vectors",
            )  # fmt: skip
        newer = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        foreign = newer if self.version == 1 else ("input_norm", "fc_bias", "joined_norms", "hidden_first")
        for name in foreign:
            check(not getattr(self, name), name, True, f"False: EAGLE-{self.version} has no such part")
        reduced = self.draft_vocab_size < vocabulary
        check(self.own_head or not reduced, "draft_vocab_size", self.draft_vocab_size, "an output head of its own")

    @property
    def kind(self) -> str:
        """Name of the kind."""
        return "eagle3" if self.version == 3 else "eagle"

    @property
    def reads_last_state(self) -> bool:
        """True if the head reads the target's last hidden state, after the final norm, instead of taps."""
        return self.version == 1

    @property
    def recycles_normed(self) -> bool:
        """True if the next step reads the state after the last norm, like the output head."""
        return self.norm_output or self.reads_last_state

    @property
    def dtype(self) -> str:
        """Torch name of the dtype of the saved weights."""
        return self.layers.dtype

    @property
    def fused_size(self) -> int:
        """Input width of `fc`: all taps, or for version 1 a token embedding and the last hidden state."""
        return self.target_hidden_size * (len(self.taps) or 2)

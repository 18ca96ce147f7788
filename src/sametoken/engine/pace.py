"""Number of prompt tokens that a step may read beside running streams, so that prompts take a bounded share of the
time.

An account in seconds: the time that streams alone would have taken for their tokens earns prompts their share; the time
that steps with prompts took beyond it is spent. Time that drafts save is for prompts first, so that neither a stream
nor a first token is slower than with plain decoding. No clock: times come in as numbers.
"""

from __future__ import annotations

import math

LEAST = 32  # prompt tokens at a time: fewer cost nearly as much, since each piece reads the whole cache
FOLLOW = 0.2  # weight of a new step in an average
FOLLOW_GAIN = 0.05  # of a step in the average gain of drafts, which differs from step to step
RISE = 0.05  # weight where streams seem slower: mostly another process delayed the step
STALE = 32  # steps with prompts after which two without them measure the streams alone again
MOST_GAIN = 2.0  # of drafts, that is counted: streams are not to slow down to a crawl


class StepSeconds:
    """Seconds of a step without prompts by its tokens, fitted as a line: steps with longer drafts take longer.

    Every step moves the line towards its own time, most where its tokens are (normalised least mean squares).
    """

    def __init__(self) -> None:
        self.known = False
        self._base = self._each = 0.0  # seconds of a step, and of each of its tokens
        self._usual = 1.0  # tokens of a step on average

    def of(self, tokens: int) -> float:
        """Expected seconds of a step with so many tokens."""
        return self._base + self._each * tokens

    def saw(self, tokens: int, seconds: float) -> None:
        """Record a step."""
        if not self.known:
            self.known, self._base, self._usual = True, seconds, float(tokens)
            return
        expected = self.of(tokens)
        error = (RISE if seconds > expected else FOLLOW) * (min(seconds, 2 * expected) - expected)
        size = tokens / self._usual
        self._base = max(0.0, self._base + error / (1 + size * size))
        self._each = max(0.0, self._each + error * size / (1 + size * size) / self._usual)
        self._usual += FOLLOW * (tokens - self._usual)


class Pace:
    """The pace of running streams while prompts are read.

    Args:
        share: largest share of the time while streams run, more than 0; 1 for no limit.
        most: prompt tokens of a step that also decodes.
    """

    def __init__(self, share: float, most: int) -> None:
        self._earned = share / (1 - share) if share < 1 else math.inf  # seconds for prompts by seconds for streams
        self.most = most
        self._alone = StepSeconds()
        self._spared = self._took = 0.0  # seconds of plain steps for the same tokens, and of steps, on average
        self._token: float | None = None  # seconds that a prompt token adds
        self._account = 0.0
        self._since = 0  # steps with prompts since streams were last measured alone
        self._beside = False  # true if the last step read prompts

    def tokens(self) -> int:
        """Prompt tokens that the next step may read if it decodes too; 0 lets the streams catch up."""
        if self._earned == math.inf or not self._alone.known:
            return self.most
        if self._account <= 0 or self._since >= STALE:
            return 0
        affordable = LEAST if self._token is None else int(self._account / self._token)
        return min(self.most, max(LEAST, affordable))

    @property
    def _gain(self) -> float:
        """Pace of streams alone with their drafts, in paces of plain decoding; at least 1."""
        return min(max(1.0, self._spared / self._took), MOST_GAIN) if self._took else 1.0

    def saw(self, prompt_tokens: int, seconds: float, tokens: int, plain: float | None = None) -> None:
        """Record a step that took `seconds` and computed `tokens` tokens of streams, their drafts included.

        Args:
            plain: seconds that plain decoding would take for the tokens that streams got, None if unknown.
        """
        if self._earned == math.inf:
            return
        # A step right after a prompt finds cold caches: that is the prompt's cost too.
        alone, self._beside = not (prompt_tokens or self._beside), prompt_tokens > 0
        if alone:
            self._alone.saw(tokens, seconds)
            self._spared += FOLLOW_GAIN * ((seconds if plain is None else plain) - self._spared)
            self._took += FOLLOW_GAIN * (seconds - self._took)
        self._since = 0 if alone else self._since + self._beside
        if not self._alone.known:
            return
        took = self._alone.of(tokens)
        if prompt_tokens:
            added = max(seconds - took, 1e-3 * seconds) / prompt_tokens
            self._token = added if self._token is None else self._token + FOLLOW * (added - self._token)
        allowed = (1 + self._earned) * took * self._gain  # seconds of this step, prompts included
        # Unspent time is not saved up: spending it at once would be a stall.
        self._account = min(allowed - took, self._account + allowed - (took if alone else seconds))

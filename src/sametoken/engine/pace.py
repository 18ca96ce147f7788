"""Limit of the prompt tokens of a step with running streams, so that prompts take a bounded share of the time.

The limit follows an account in seconds. Each step adds the share of prompts in the time that streams alone would have
taken, and subtracts the additional time that a step with prompts took. Time that drafts save goes to prompts first, so
that neither a stream nor a first token is slower than with plain decoding. Times are arguments; no clock is read.
"""

from __future__ import annotations

import math

LEAST = 32  # least prompt tokens of a piece: fewer cost nearly as much, since each piece reads the whole cache
FOLLOW = 0.2  # weight of a new step in an average
FOLLOW_GAIN = 0.05  # weight of a new step in the average gain of drafts, which varies from step to step
RISE = 0.05  # weight of a step that is slower than expected, mostly delayed by another process
STALE = 32  # steps with prompts after which the streams are measured alone again, in two steps
MOST_GAIN = 2.0  # limit of the counted gain of drafts, so that streams do not become too slow


class StepSeconds:
    """Linear fit of the seconds of a step without prompts to its number of tokens.

    Every step moves the line towards its own time, by normalised least mean squares.
    """

    def __init__(self) -> None:
        self.known = False
        self._base = self._each = 0.0  # seconds of a step, and of each token
        self._usual = 1.0  # average tokens of a step

    def of(self, tokens: int) -> float:
        """Expected seconds of a step with `tokens` tokens."""
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
    """Account of the time for prompts while streams run.

    Args:
        share: largest share of the time for prompts while streams run, more than 0; 1 for no limit.
        most: greatest number of prompt tokens of a step that also decodes.
    """

    def __init__(self, share: float, most: int) -> None:
        self._earned = share / (1 - share) if share < 1 else math.inf  # seconds for prompts per second for streams
        self.most = most
        self._alone = StepSeconds()
        self._spared = self._took = 0.0  # average seconds of plain steps for equal tokens, and of steps
        self._token: float | None = None  # seconds that a prompt token adds
        self._account = 0.0
        self._since = 0  # steps with prompts since streams were last measured alone
        self._read_prompts = False  # true if the last step read prompts

    def tokens(self) -> int:
        """Limit of the prompt tokens of the next step if it also decodes; 0 for a step of streams alone."""
        if self._earned == math.inf or not self._alone.known:
            return self.most
        if self._account <= 0 or self._since >= STALE:
            return 0
        affordable = LEAST if self._token is None else int(self._account / self._token)
        return min(self.most, max(LEAST, affordable))

    @property
    def _gain(self) -> float:
        """Speed of streams alone with drafts, relative to plain decoding; at least 1."""
        return min(max(1.0, self._spared / self._took), MOST_GAIN) if self._took else 1.0

    def saw(self, prompt_tokens: int, seconds: float, tokens: int, plain: float | None = None) -> None:
        """Record a step that took `seconds` and computed `tokens` tokens of streams, their drafts included.

        Args:
            prompt_tokens: number of prompt tokens in the step.
            plain: seconds of plain decoding for the tokens that the streams received; None if unknown.
        """
        if self._earned == math.inf:
            return
        # A step right after a prompt has cold caches, which is a cost of the prompt.
        alone, self._read_prompts = not (prompt_tokens or self._read_prompts), prompt_tokens > 0
        if alone:
            self._alone.saw(tokens, seconds)
            self._spared += FOLLOW_GAIN * ((seconds if plain is None else plain) - self._spared)
            self._took += FOLLOW_GAIN * (seconds - self._took)
        self._since = 0 if alone else self._since + self._read_prompts
        if not self._alone.known:
            return
        took = self._alone.of(tokens)
        if prompt_tokens:
            added = max(seconds - took, 1e-3 * seconds) / prompt_tokens
            self._token = added if self._token is None else self._token + FOLLOW * (added - self._token)
        allowed = (1 + self._earned) * took * self._gain  # seconds of this step, prompts included
        # Unspent time is limited to one step: much time spent at once would stall the streams.
        self._account = min(allowed - took, self._account + allowed - (took if alone else seconds))

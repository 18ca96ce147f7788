"""Number of prompt tokens that a step may read beside running streams, so that prompts take a bounded share of the
time.

An account in seconds: the time that streams alone would have taken for their tokens earns prompts their share; the time
that steps took beyond it is spent. No clock: times come in as numbers.
"""

from __future__ import annotations

import math

LEAST = 32  # prompt tokens at a time: fewer cost nearly as much, since each piece reads the whole cache
FOLLOW = 0.2  # weight of a new step in an average
RISE = 0.05  # weight where streams seem slower: mostly another process delayed the step
STALE = 32  # steps with prompts after which two without them measure the streams alone again


class Pace:
    """The pace of running streams while prompts are read.

    Args:
        share: largest share of the time while streams run, more than 0; 1 for no limit.
        most: prompt tokens of a step that also decodes.
    """

    def __init__(self, share: float, most: int) -> None:
        self._earned = share / (1 - share) if share < 1 else math.inf  # seconds for prompts by seconds for streams
        self.most = most
        self._step: float | None = None  # seconds of a step without prompts
        self._progress = 1.0  # tokens of a stream in such a step
        self._token: float | None = None  # seconds that a prompt token adds
        self._account = 0.0
        self._since = 0  # steps with prompts since streams were last measured alone
        self._beside = False  # true if the last step read prompts

    def tokens(self) -> int:
        """Prompt tokens that the next step may read if it decodes too; 0 lets the streams catch up."""
        if self._earned == math.inf or self._step is None:
            return self.most
        if self._account <= 0 or self._since >= STALE:
            return 0
        affordable = LEAST if self._token is None else int(self._account / self._token)
        return min(self.most, max(LEAST, affordable))

    def saw(self, prompt_tokens: int, seconds: float, progress: float) -> None:
        """Record a step that decoded: it took `seconds` and gave each stream `progress` tokens on average."""
        if self._earned == math.inf:
            return
        # A step right after a prompt finds cold caches: that is the prompt's cost too.
        alone, self._beside = not (prompt_tokens or self._beside), prompt_tokens > 0
        if alone:
            self._see_alone(seconds, progress)
        self._since = 0 if alone else self._since + self._beside
        if self._step is None:
            return
        worth = progress * self._step / self._progress
        if prompt_tokens:
            added = max(seconds - worth, 1e-3 * seconds) / prompt_tokens
            self._token = added if self._token is None else self._token + FOLLOW * (added - self._token)
        # Unspent time is not saved up: spending it at once would be a stall.
        self._account = min(self._earned * self._step, self._account + self._earned * worth - (seconds - worth))

    def _see_alone(self, seconds: float, progress: float) -> None:
        known = seconds if self._step is None else self._step
        self._step = known + (RISE if seconds > known else FOLLOW) * (min(seconds, 2 * known) - known)
        self._progress += FOLLOW * (progress - self._progress)

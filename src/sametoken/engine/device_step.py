"""One decoding step as a function of tensors that stay on the device: propose, forward, draw, verify, commit, advance.

Nothing here waits for a value, so the whole of it can be captured. Legend: B lanes, K levels, N nodes, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.drafters.device import Proposer
from sametoken.engine.runner import Runner
from sametoken.runtime.cache import Span
from sametoken.runtime.draw import draw
from sametoken.runtime.lanes import Lanes
from sametoken.speculation.draft import PADDING, Draft, chain_parents
from sametoken.speculation.sampling import Sampling
from sametoken.speculation.verify import verify


def decode_step(runner: Runner, proposer: Proposer, lanes: Lanes, sampling: Sampling, keys: int) -> None:
    """Advances every active lane by the tokens that one forward of the target grants it.

    The accepted path of a chain is where it belongs already, so committing it is adding its length.

    Args:
        sampling: of the lanes, without grammars; its history is brought up to date.
        keys: bound of what lies in any row, this step's nodes included.
    """
    draft = _draft(lanes, proposer.guess(lanes, sampling, keys))
    batch, nodes = draft.tokens.shape
    reach = torch.ones(nodes, nodes, dtype=torch.bool, device=draft.tokens.device).tril().expand(batch, -1, -1)
    span = Span(lanes.rows, (), lanes.lengths, reach, nodes, keys)
    hidden = runner.decoder.run(draft.tokens.flatten(), runner.cache, [span])
    logits = runner.decoder.logits(hidden.last).view(batch, nodes, -1)
    drawn = draw(logits, draft, reach, lanes.lengths, sampling)
    verdict = verify(draft, reach, drawn)

    count = (verdict.length + 1) * lanes.active
    lanes.emitted.copy_(torch.cat([count.unsqueeze(1), drawn], dim=1))
    newest = draft.tokens.gather(1, verdict.length.unsqueeze(1)).squeeze(1)
    moved = torch.stack([newest, verdict.bonus], dim=1)
    lanes.last.copy_(torch.where(lanes.active.unsqueeze(1) > 0, moved, lanes.last))
    lanes.lengths.add_(count)
    sampling.remember(drawn, count)


def _draft(lanes: Lanes, guesses: Tensor) -> Draft:
    """The pending token and its guesses as a chain, cut at each lane's limit."""
    batch, depth = guesses.shape
    level = torch.arange(depth, device=guesses.device)
    useful = guesses.masked_fill(level >= lanes.limits.unsqueeze(1), PADDING)
    tokens = torch.cat([lanes.last[:, 1:], useful], dim=1)
    return Draft(tokens, chain_parents(batch, depth + 1, guesses.device))

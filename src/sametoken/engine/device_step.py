"""One decoding step as a function of tensors that stay on the device: propose, forward, draw, verify, commit, advance.

Nothing here waits for a value, so the whole of it can be captured. Legend: B lanes, N nodes, K tokens of a path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.drafters.device import Proposer
from sametoken.engine.runner import Runner
from sametoken.runtime.cache import Span
from sametoken.runtime.draw import draw
from sametoken.runtime.lanes import Lanes
from sametoken.speculation.draft import PADDING, ancestors, chain_reach, depth
from sametoken.speculation.sampling import Sampling
from sametoken.speculation.verify import verify


def decode_step(runner: Runner, proposer: Proposer, lanes: Lanes, sampling: Sampling, keys: int) -> None:
    """Advances every active lane by the tokens that one forward of the target grants it.

    Args:
        sampling: of the lanes, without grammars; its history is brought up to date.
        keys: bound of what lies in any row, this step's slots included.
    """
    draft = proposer.guess(lanes, sampling, keys)
    batch, nodes = draft.tokens.shape
    reach = chain_reach(batch, nodes, draft.tokens.device) if proposer.chain else ancestors(draft.parents)
    span = Span(lanes.rows, (), lanes.lengths, reach, nodes, keys)
    hidden = runner.decoder.run(draft.tokens.flatten(), runner.cache, [span], proposer.taps)
    logits = runner.decoder.logits(hidden.last).view(batch, nodes, -1)
    drawn = draw(logits, draft, reach, lanes.lengths, sampling)
    verdict = verify(draft, reach, drawn)
    path = verdict.path[:, : proposer.depth + 1]
    if not proposer.chain:
        runner.cache.move(lanes.rows, lanes.lengths, path)
    depths = depth(reach) * (draft.tokens != PADDING)
    if proposer.taps:
        features = torch.cat(hidden.taps, dim=1).view(batch, nodes, -1)
        lanes.features.copy_(features.gather(1, path.unsqueeze(2).expand(-1, -1, features.shape[2])))
    tokens, counts = drawn.gather(1, path), verdict.length + 1
    sampling.remember(tokens, counts * lanes.active)
    _advance(lanes, tokens, counts, depths[:, 1:])


def _advance(lanes: Lanes, tokens: Tensor, counts: Tensor, depths: Tensor) -> None:
    """Hands every active lane the first `counts` of its tokens [B, K + 1]."""
    granted, active = counts * lanes.active, lanes.active > 0
    lanes.emitted.copy_(torch.cat([granted.unsqueeze(1), tokens, depths], dim=1))
    lanes.tokens.copy_(torch.where(active.unsqueeze(1), tokens, lanes.tokens))
    lanes.counts.copy_(torch.where(active, counts, lanes.counts))
    lanes.lengths.add_(granted)
    lanes.room.sub_(granted)

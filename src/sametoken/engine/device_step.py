"""Decoding step as a function of tensors that stay on the device: propose, forward, draw, verify, commit, advance.

The host waits for no value, so that the whole step can be captured. Legend: B graph slots, N nodes, K tokens of a path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sametoken.drafters.device import Proposer
from sametoken.engine.runner import Runner
from sametoken.runtime.cache import Span
from sametoken.runtime.draw import draw
from sametoken.runtime.graph_slots import GraphSlots
from sametoken.speculation.draft import PADDING, ancestors, chain_mask, depth
from sametoken.speculation.sampling import Sampling
from sametoken.speculation.verify import verify


def decode_step(runner: Runner, proposer: Proposer, graph_slots: GraphSlots, sampling: Sampling, keys: int) -> None:
    """Advance every active graph slot by the tokens accepted or drawn in one forward of the target.

    Args:
        runner: runner of the target.
        proposer: drafter on the device.
        graph_slots: state of the rows.
        sampling: sampling of the graph slots, without grammars; its history is updated.
        keys: upper bound of the keys of any row, the slots of this step included.
    """
    draft = proposer.guess(graph_slots, sampling, keys)
    batch, nodes = draft.tokens.shape
    ancestor_mask = chain_mask(batch, nodes, draft.tokens.device) if proposer.chain else ancestors(draft.parents)
    span = Span(graph_slots.rows, (), graph_slots.lengths, ancestor_mask, nodes, keys)
    hidden = runner.decoder.run(draft.tokens.flatten(), runner.cache, [span], proposer.taps)
    logits = runner.decoder.logits(hidden.last).view(batch, nodes, -1)
    drawn = draw(logits, draft, ancestor_mask, graph_slots.lengths, sampling)
    verdict = verify(draft, ancestor_mask, drawn)
    path = verdict.path[:, : proposer.depth + 1]
    if not proposer.chain:
        runner.cache.move(graph_slots.rows, graph_slots.lengths, path)
    depths = depth(ancestor_mask) * (draft.tokens != PADDING)
    if proposer.taps:
        features = torch.cat(hidden.taps, dim=1).view(batch, nodes, -1)
        graph_slots.features.copy_(features.gather(1, path.unsqueeze(2).expand(-1, -1, features.shape[2])))
    tokens, counts = drawn.gather(1, path), verdict.length + 1
    sampling.remember(tokens, counts * graph_slots.active)
    _advance(graph_slots, tokens, counts, depths[:, 1:])


def _advance(graph_slots: GraphSlots, tokens: Tensor, counts: Tensor, depths: Tensor) -> None:
    """Append the first `counts` of the tokens [B, K + 1] to every active graph slot."""
    granted, active = counts * graph_slots.active, graph_slots.active > 0
    graph_slots.emitted.copy_(torch.cat([granted.unsqueeze(1), tokens, depths], dim=1))
    graph_slots.tokens.copy_(torch.where(active.unsqueeze(1), tokens, graph_slots.tokens))
    graph_slots.counts.copy_(torch.where(active, counts, graph_slots.counts))
    graph_slots.lengths.add_(granted)
    graph_slots.room.sub_(granted)

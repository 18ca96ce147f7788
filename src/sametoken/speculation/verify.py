"""Verification of drafts: a node is accepted if and only if it is the token that the target draws there.

If the target can draw no token after a node, that node becomes the root of the next step.

The target's draws do not depend on the draft, so neither does the output (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.speculation.draft import Draft


class Verdict(NamedTuple):
    """Result of verifying a draft; B rows, N nodes.

    Attributes:
        path: [B, N] accepted nodes, root first, the last one repeated as padding.
        length: [B] accepted draft tokens, 0 .. N - 1; the root is not a draft token.
        bonus: [B] the target's draw after the path, which is the next pending token; -1 if the target can draw no
        token after the root (`length` is 0 then).
    """

    path: Tensor
    length: Tensor
    bonus: Tensor


def verify(draft: Draft, ancestor_mask: Tensor, drawn: Tensor) -> Verdict:
    """Find the longest path on which every node equals the target's draw at its parent.

    Args:
        draft: the tree; padding nodes carry token -1.
        ancestor_mask: [B, N, N] `ancestors(draft.parents)`.
        drawn: [B, N] the target's draw after each node, -1 for none.
    """
    if drawn.device.type == "cpu":
        return _walk(draft, drawn)
    return _search(draft, ancestor_mask, drawn)


def _walk(draft: Draft, drawn: Tensor) -> Verdict:
    """Verify node by node on the host; ten times cheaper than `_search` there."""
    if draft.tokens.shape[1] == 1:
        return Verdict(torch.zeros_like(drawn), torch.zeros_like(drawn[:, 0]), drawn[:, 0])
    paths, lengths, bonuses = [], [], []
    for tokens, parents, draws in zip(draft.tokens.tolist(), draft.parents.tolist(), drawn.tolist(), strict=True):
        best, accepted = [0], {0: [0]}
        for node in range(1, len(tokens)):  # parents precede their children
            above = accepted.get(parents[node])
            if above is not None and tokens[node] == draws[parents[node]] and min(tokens[node], draws[node]) >= 0:
                accepted[node] = [*above, node]
                best = max(best, accepted[node], key=len)  # the first of equals
        lengths.append(len(best) - 1)
        bonuses.append(draws[best[-1]])
        paths.append(best + best[-1:] * (len(tokens) - len(best)))
    return Verdict(torch.tensor(paths), torch.tensor(lengths), torch.tensor(bonuses))


def _search(draft: Draft, ancestor_mask: Tensor, drawn: Tensor) -> Verdict:
    """Verify all nodes at once without reading a value on the host, for captured steps."""
    nodes = draft.tokens.shape[1]
    index = torch.arange(nodes, device=drawn.device)
    wrong = draft.tokens != drawn.gather(1, draft.parents.clamp(min=0))
    wrong |= torch.minimum(draft.tokens, drawn) < 0
    wrong[:, 0] = False
    accepted = ~(ancestor_mask & wrong.unsqueeze(1)).any(-1)
    # Accepted nodes form one path unless siblings repeat a token; argmax takes the first of equals, so they agree.
    length, last = torch.where(accepted, ancestor_mask.sum(-1) - 1, -1).max(dim=1)
    on_path = ancestor_mask.gather(1, last.view(-1, 1, 1).expand(-1, 1, nodes)).squeeze(1)
    path = torch.where(on_path, index, nodes).sort(dim=1).values.minimum(last.unsqueeze(1))
    return Verdict(path, length, drawn.gather(1, last.unsqueeze(1)).squeeze(1))

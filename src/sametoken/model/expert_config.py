"""Configuration of a mixture of experts, read from a `config.json`; `experts.py` has the module."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sametoken.errors import CheckpointError, shown
from sametoken.model.keys import MOST_LAYERS, Keys

MOST_EXPERTS = 1 << 12
TOKEN_WORK = 0.05  # time of a token's arithmetic as a share of the time to read its weights


@dataclass(frozen=True)
class ExpertConfig:
    """Configuration of the blocks with a router and many small MLPs in place of one.

    Attributes:
        count: experts of a block.
        chosen: experts that compute for a token.
        width: intermediate size of an expert.
        normalised: the weights of the chosen experts sum to 1.
        layers: per layer, true if it has experts.
        shared: intermediate size of an expert that computes for every token, times a gate of its own; 0 for none.
        bias: true if the router and the experts have biases.
        clamp: (gain, limit) of gpt-oss's activation, (min(limit, up) + 1) gate sigmoid(gain gate); None for the usual.
        sigmoid: an expert's score is the sigmoid of its logit, not its share in the softmax of all.
        choice_bias: a learned bias per expert, added to the scores by which experts are chosen, not to their weights.
        groups: number of groups of equal size; experts are chosen from the best `chosen_groups` of them.
        group_best: number of a group's best scores whose sum is the group's score.
        weight_scale: factor of the weights of the chosen experts.
        shared_gate: the shared expert has a gate; without it, its result has weight 1.
        weighted_input: an expert's weight multiplies its input, not its result (Llama 4); experts are chosen by logits,
            which differ even where sigmoids are 1.
        wide_router: the logits of experts are float32, not rounded to the dtype of the model.
    """

    count: int
    chosen: int
    width: int
    normalised: bool
    layers: tuple[bool, ...]
    shared: int = 0
    bias: bool = False
    clamp: tuple[float, float] | None = None
    sigmoid: bool = False
    choice_bias: bool = False
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 2
    weight_scale: float = 1.0
    shared_gate: bool = True
    wide_router: bool = False
    weighted_input: bool = False

    @property
    def router_outputs(self) -> int:
        """Number of outputs of the router: a logit for each expert, and one for the shared expert's gate."""
        return self.count + (self.shared > 0 and self.shared_gate)

    def work(self, tokens: float) -> float:
        """Cost of a forward of `tokens` tokens in reads of an expert: the expected number of distinct experts, if
        tokens choose independently, plus `TOKEN_WORK` of a read for the arithmetic of each chosen expert.
        """
        read = self.count * (1 - math.pow(1 - self.chosen / self.count, tokens))
        return read + TOKEN_WORK * self.chosen * tokens

    def parameters(self, hidden: int) -> int:
        """Number of parameters of a block's experts, its router included."""
        biases = (2 * self.width + hidden + 1 if self.bias else 0) + self.choice_bias
        own = self.count * (3 * hidden * self.width + biases) + 3 * hidden * self.shared
        return own + hidden * self.router_outputs


def read_experts(
    keys: Keys,
    count_keys: tuple[str, ...],
    count: int,
    *,
    chosen: int | None,
    width: int,
    normalised: bool,
    layers: tuple[bool, ...],
    shared: int = 0,
) -> ExpertConfig:
    """Read the configuration of experts from a `config.json`.

    Args:
        count_keys: names of the number of experts in the family's files; the first one present counts.
        count, chosen: values of absent keys.
        width, normalised, layers, shared: as in `ExpertConfig`.

    Raises:
        CheckpointError: a key's value has the wrong type, or more experts are chosen than exist.
    """
    count_key = next((key for key in count_keys if keys.values.get(key) is not None), count_keys[0])
    count = keys.integer(count_key, count, MOST_EXPERTS)
    chosen = keys.integer("num_experts_per_tok", chosen, MOST_EXPERTS)
    if chosen > count:
        raise CheckpointError(
            f"config.json has {chosen} 'num_experts_per_tok' and {count} {count_key!r}, expected no more than there "
            "are: is this file complete?"
        )
    return ExpertConfig(count, chosen, width, normalised, layers, shared)


def grouped(experts: ExpertConfig, keys: Keys, absent: tuple[int, int], group_best: int) -> ExpertConfig:
    """Experts with the groups of a `config.json`; `absent`: number of groups and of chosen groups if it states none.

    Raises:
        CheckpointError: the groups are not equal, or hold too few experts to choose from.
    """
    groups = keys.integer("n_group", absent[0], MOST_EXPERTS)
    chosen = keys.integer("topk_group", absent[1], MOST_EXPERTS)
    size = experts.count // groups
    if experts.count % groups or chosen > groups or size < group_best or size * chosen < experts.chosen:
        raise CheckpointError(
            f"config.json has {experts.count} experts in {groups} 'n_group', of which {chosen} 'topk_group' are "
            f"chosen, expected groups of equal size, with {group_best} experts or more, and {experts.chosen} "
            "'num_experts_per_tok' in the chosen ones: is this file complete?"
        )
    return replace(experts, groups=groups, chosen_groups=chosen, group_best=group_best)


def sparse_layers(keys: Keys) -> tuple[bool, ...]:
    """Layers with experts in Qwen: every `decoder_sparse_step`-th one that is not in `mlp_only_layers`."""
    layers, step = keys.integer("num_hidden_layers", most=MOST_LAYERS), keys.integer("decoder_sparse_step", 1)
    dense = keys.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise CheckpointError(f"config.json has {shown(dense)} for 'mlp_only_layers', expected a list of layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))

"""Options of speculative decoding in an engine. Names are those of TensorRT-LLM and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from sametoken import kinds
from sametoken.errors import ConfigError
from sametoken.options.declaration import Elsewhere, Positive, Settings

NO_DRAFT, AUTO = "none", "auto"  # methods that name no drafter: decoding without drafts, and a choice among all
METHODS = (*kinds.choices(), AUTO, NO_DRAFT)
if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[METHODS]
# Default on a CPU if neither a draft model or head nor a method is given: the method, and its draft length.
FREE, FREE_LENGTH = next((kind.name, kind.unasked) for kind in kinds.kinds() if kind.unasked)
# Description of the draft, by method, for methods with weights.
MODEL_METHODS = {kind.name: kind.what for kind in kinds.kinds() if kind.weights}

# EAGLE-2's names: the option that each sets, and the number of nodes by which EAGLE-2 counts more.
ALIASES = {"depth": ("max_draft_len", 0), "top_k": ("tree_top_k", 0), "total_tokens": ("max_total_draft_tokens", 1)}


class SpeculativeConfig(Settings):
    """Drafting.

    EAGLE-2's names are accepted too: `depth` for max_draft_len, `top_k` for tree_top_k, and `total_tokens`, which
    counts the root, for max_total_draft_tokens + 1.
    """

    method: Method | None = None
    """how drafts are made; without it: "eagle", "eagle3" or "medusa" for such a head, "draft_target" for a draft model,
    or "auto" on a CPU where nothing else about drafts is set; without a draft "suffix", which needs no weights, on a
    CPU and "none" on a GPU. "mtp" is the prediction block in the files of some targets, which needs no draft. "none" is
    plain decoding; with "auto" the engine chooses among its drafters for each request and step, n-grams aside, whose
    guesses suffix lookup has too."""
    max_draft_len: Annotated[
        int,
        Field(ge=1, le=128),
        Elsewhere(
            "trtllm speculative_config.max_draft_len",
            "trtllm MTP.num_nextn_predict_layers",
            "vllm num_speculative_tokens",
            "llama-server draft_max/draft_n/spec_draft_n_max",
        ),
    ] = 4
    """number of tokens on the longest path of a draft (K). 12 with "auto", and without a draft and a method on a CPU,
    unless this, a tree, a budget or a schedule is given."""
    adaptive: bool = True
    """choose the draft length of every step, from 0 to `max_draft_len`, that gives the most tokens per second; off:
    every draft has `max_draft_len` tokens."""
    draft_len_schedule: Annotated[
        dict[Positive, Annotated[int, Field(ge=0)]] | None,
        Elsewhere("trtllm speculative_config.draft_len_schedule", "vllm num_speculative_tokens_per_batch_size"),
    ] = None
    """draft length by batch size. Example 4:4,16:2: batches of up to 4 sequences have drafts of 4 tokens, those of up
    to 16 drafts of 2, larger ones none. The smallest size must have `max_draft_len`."""
    max_concurrency: Annotated[
        Positive | None, Elsewhere("trtllm speculative_config.max_concurrency", "vllm disable_by_batch_size")
    ] = None
    """largest batch for which drafts are made; without it: any."""
    acceptance_window: Annotated[int, Field(ge=0), Elsewhere("trtllm speculative_config.acceptance_window")] = 0
    """number of finished requests whose average acceptance_length_threshold uses; 0 is off."""
    acceptance_length_threshold: Annotated[
        float, Field(ge=0), Elsewhere("trtllm speculative_config.acceptance_length_threshold")
    ] = 0.0
    """number of accepted guesses per forward with a draft, the bonus token not counted: when the average over
    acceptance_window requests is below it, drafting stops for good."""
    tree_top_k: Annotated[int, Field(ge=1, le=32), Elsewhere("trtllm Eagle.dynamic_tree_max_topK")] = 1
    """for draft_target, eagle, eagle3 and mtp: number of branches that each level of a draft keeps and expands; 1 is a
    chain."""
    max_total_draft_tokens: Annotated[
        Annotated[int, Field(ge=1, le=512)] | None, Elsewhere("trtllm speculative_config.max_total_draft_tokens")
    ] = None
    """number of tokens in a draft at most, in a tree or a chain; the most probable are kept. Without it: `max_draft_len
    * tree_top_k`. For medusa: how many nodes of the head's own tree are used; without it: all."""
    max_matching_ngram_size: Annotated[
        int, Field(ge=1, le=64), Elsewhere("trtllm NGram.max_matching_ngram_size", "vllm ngram.prompt_lookup_max")
    ] = 3
    """for ngram: number of last tokens that are looked up in the earlier text; the longest n-gram is tried first."""
    min_matching_ngram_size: Annotated[int, Field(ge=1, le=64), Elsewhere("vllm ngram.prompt_lookup_min")] = 1
    """for ngram: length of the shortest n-gram that is looked up; it is tried last."""
    is_use_oldest: Annotated[bool, Elsewhere("trtllm NGram.is_use_oldest")] = False
    """for ngram: continue the oldest match instead of the newest."""
    is_public_pool: Annotated[bool, Elsewhere("trtllm NGram.is_public_pool")] = False
    """for ngram: look n-grams up in the texts of all requests."""
    suffix_decoding_max_tree_depth: Annotated[
        int, Field(ge=2), Elsewhere("vllm suffix.suffix_decoding_max_tree_depth")
    ] = 24
    """for suffix: number of tokens of a match and its draft together at most."""
    suffix_decoding_max_cached_requests: Annotated[
        int, Field(ge=0), Elsewhere("trtllm SA.global_pool_size", "vllm suffix.suffix_decoding_max_cached_requests")
    ] = 10_000
    """for suffix: number of finished outputs that can be searched."""
    suffix_decoding_max_spec_factor: Annotated[
        float, Field(gt=0), Elsewhere("vllm suffix.suffix_decoding_max_spec_factor")
    ] = 1.0
    """for suffix: number of draft tokens per matched token at most."""
    suffix_decoding_min_token_prob: Annotated[
        float, Field(ge=0, le=1), Elsewhere("vllm suffix.suffix_decoding_min_token_prob")
    ] = 0.1
    """for suffix: leave out draft tokens that are less probable than this."""

    draft_window: Positive = 512
    """for draft_target: number of last tokens that a draft model reads of a text that is longer, beside its first 4. It
    reads a text whole that is shorter or mostly read."""
    draft_vocab_size: Positive | None = None
    """for draft_target: number of tokens that a draft model guesses among: special tokens, those that texts use most,
    and in one half of the places those of recent texts. A guess reads as many rows of the output layer. Without it:
    all tokens."""
    draft_token_map: Annotated[str | None, Elsewhere("sglang speculative_token_map")] = None
    """for draft_target: file of the tokens that texts use, the most used first: a list of ids or an object of counts by
    id (.json), or a tensor of ids (.pt). A draft model guesses among the first draft_vocab_size of them, or among all.
    Without it: the order in which the tokenizer's training found them."""
    draft_tensor_parallel_size: Annotated[Positive, Elsewhere("vllm draft_tensor_parallel_size")] = 1
    """number of processes that compute a draft model: 1, or as many as compute the target, each a part of it. 1 is
    faster for most drafts; more are for a draft that one process cannot hold. A head is computed by one."""

    def __init__(self, **values: Any) -> None:
        for alias, (name, roots) in ALIASES.items():
            if alias not in values:
                continue
            if name in values:
                raise ConfigError(f"{alias} and {name} are the same setting; give one of them")
            given = values.pop(alias)
            if isinstance(given, bool) or not isinstance(given, int) or given <= roots:
                raise ConfigError(f"SpeculativeConfig.{alias} = {given!r}: expected a whole number above {roots}")
            values[name] = given - roots
        super().__init__(**values)

    @property
    def narrows(self) -> str:
        """Options that leave out tokens of a draft model's vocabulary, as the user gave them; "" without."""
        given = {"draft_vocab_size": self.draft_vocab_size, "draft_token_map": self.draft_token_map}
        return " and ".join(f"{name} {value}" for name, value in given.items() if value is not None)

    @property
    def longest(self) -> int:
        """Number of tokens on the longest path that both the length and the budget of a draft allow."""
        return min(self.max_draft_len, self.max_total_draft_tokens or self.max_draft_len)

    @property
    def most_nodes(self) -> int:
        """Number of KV cache slots after the pending token that one draft may occupy, at most."""
        return max(self.max_total_draft_tokens or 0, self.max_draft_len * self.tree_top_k)

    @property
    def budget(self) -> int:
        """Number of tokens of a draft (a tree or a chain), at most."""
        return self.max_total_draft_tokens or self.max_draft_len * self.tree_top_k

    @model_validator(mode="after")
    def _agree(self) -> SpeculativeConfig:
        if self.min_matching_ngram_size > self.max_matching_ngram_size:
            raise ValueError(
                f"min_matching_ngram_size {self.min_matching_ngram_size} exceeds "
                f"max_matching_ngram_size {self.max_matching_ngram_size}"
            )
        if bool(self.acceptance_window) != bool(self.acceptance_length_threshold):
            raise ValueError("acceptance_window and acceptance_length_threshold work together; set both or neither")
        schedule = self.draft_len_schedule
        if schedule is not None:
            if self.max_concurrency is not None:
                raise ValueError("draft_len_schedule and max_concurrency exclude each other; set one")
            if not schedule:
                raise ValueError("draft_len_schedule is empty; expected for example {4: 4, 16: 2}")
            smallest = min(schedule)
            if schedule[smallest] != self.max_draft_len or max(schedule.values()) > self.max_draft_len:
                raise ValueError(
                    f"draft_len_schedule gives drafts of {schedule[smallest]} tokens to batches of up to {smallest}, "
                    f"and of {max(schedule.values())} tokens at most; both numbers must be max_draft_len, "
                    f"{self.max_draft_len}"
                )
        return self

    @property
    def schedule(self) -> dict[int, int] | None:
        """Draft length by largest batch size, from `max_concurrency` or `draft_len_schedule`; None without both."""
        if self.max_concurrency is not None:
            return {self.max_concurrency: self.max_draft_len}
        return self.draft_len_schedule

"""Interface of a kind of drafter with weights: recognise, read, write and explain its files, and build its drafter.

A subclass is what `Kind.drafts` names. Whoever reads, serves, exports or explains a head asks these methods and never
which kind it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sametoken import kinds
from sametoken.checkpoint.quantised.collect import Item
from sametoken.checkpoint.tensors import Stored
from sametoken.drafters.base import Drafter
from sametoken.errors import ConfigError
from sametoken.heads.files import Files
from sametoken.kinds import Kind
from sametoken.model.config import ModelConfig
from sametoken.model.decoder import Decoder
from sametoken.model.formats.base import WeightFormat
from sametoken.model.formats.coded import Coded
from sametoken.options.speculation import SpeculativeConfig
from sametoken.runtime.cache import KVCache

CacheFor = Callable[[ModelConfig, torch.dtype], KVCache]


class HeadConfig(Protocol):
    """Architecture facts of a head.

    Attributes:
        kind: name of its kind.
        dtype: torch name of the dtype that its weights were saved in.
    """

    @property
    def kind(self) -> str: ...

    @property
    def dtype(self) -> str: ...


class Head(nn.Module, ABC):
    """A module that guesses from its target's hidden states, the same in training and in serving.

    Attributes:
        config: its architecture.
        dtype: of weights and activations.
    """

    config: Any  # the configuration class of its kind, a `HeadConfig`
    dtype: torch.dtype

    @property
    @abstractmethod
    def draft_ids(self) -> Tensor:
        """[Vd] int64, the target's id of every token that it can guess."""


class Reading(NamedTuple):
    """Target layers that a head's files may mean (outputs of blocks, 0-based), and who would read them so."""

    taps: tuple[int, ...]
    name: str


# The engines that heads are written for, by their layout; `hf` is our own, which all of them read where they can. What
# each accepts was read in vLLM 0.33, SGLang 0.5.23, TensorRT-LLM's PyTorch models (2026) and speculators 0.9.
ENGINES = {
    "hf": "sametoken",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "speculators": "speculators",
}
NO_SUCH_DRAFTS = "it has no such drafts"  # why an engine runs no head of a kind
LAST_STATE = (Reading((), "the only one"),)  # of heads that read the last hidden state and have no layers to choose


@dataclass(frozen=True)
class Described:
    """Description of a head from its files.

    Attributes:
        config: what the head computes.
        producer: who seems to have made it.
        notes: what was assumed, one sentence each.
        facts: name and value in words, in the order to show them.
        readings: of the ids of layers, the chosen one first.
    """

    config: HeadConfig
    producer: str
    notes: tuple[str, ...]
    facts: Mapping[str, str]
    readings: tuple[Reading, ...] = LAST_STATE


class Written(NamedTuple):
    """Files to write into a directory.

    Attributes:
        config: config.json.
        tensors: by the names in the file; weights that are rounded as their codes.
        file: name of the weight file.
    """

    config: dict[str, Any]
    tensors: Mapping[str, Tensor | Coded]
    file: str


class Weighted(ABC):
    """Serving of a model or a head."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def cached_layers(self, module: Any) -> ModelConfig | None:
        """The blocks whose keys and values it keeps beside the target's, None for none."""
        return None

    def most_nodes(self, config: SpeculativeConfig, module: Any) -> int:
        """Cache slots past the pending token that a draft may take."""
        return config.most_nodes

    @abstractmethod
    def build(self, config: SpeculativeConfig, module: Any, target: Decoder, cache_for: CacheFor) -> Drafter:
        """The drafter that guesses with a module.

        Args:
            target: the model that is guessed for.
            cache_for: makes a cache of such blocks in the engine's pages.
        """


class HeadKind(Weighted):
    """A kind of head: its files in every engine's layout, its module and its drafter."""

    @abstractmethod
    def recognises(self, files: Files) -> bool:
        """True if a directory holds a head of this kind, by the names of its tensors and its config.json."""

    @abstractmethod
    def describe(self, files: Files, target: ModelConfig) -> Described:
        """Describe a head from its files.

        Raises:
            CheckpointError: config.json lacks a fact or contradicts the tensors.
            UnsupportedModelError: some part of it is not implemented.
            DraftMismatchError: it was made for another target, or is another kind of head than it says.
        """

    @abstractmethod
    def empty(self, config: Any, dtype: torch.dtype, format: WeightFormat | None = None) -> Head:
        """A head of this architecture, its weights not set.

        Args:
            format: what the linears are quantised to when they are packed, None for nothing.
        """

    @abstractmethod
    def fill(
        self, head: Any, stored: Iterator[Stored | Item], files: Files, device: torch.device | str, *, pack: bool
    ) -> None:
        """Put stored tensors into an empty head on the meta device, and pack its linears if asked to.

        Weights that another tool quantised are one item each, `checkpoint.fill.load_parameters` takes them.

        Raises:
            CheckpointError: tensors are missing, unexpected or damaged.
        """

    @abstractmethod
    def lay_out(self, head: Any, target: ModelConfig, layout: str, target_name: str) -> Written:
        """A head as an engine reads it, a key of `ENGINES`; nothing is refused here."""

    def refusals(self, config: Any, layout: str, tensors: Mapping[str, Tensor | Coded] | None = None) -> list[str]:
        """Reasons why an engine cannot run a head as it was trained; none means that it can.

        Args:
            tensors: of the head in our own layout, where values decide; without them such a part counts as in use.
        """
        return [] if layout == "hf" else [NO_SUCH_DRAFTS]

    def advice(self, config: Any, layout: str) -> tuple[str, ...]:
        """Advice for serving an exported head with an engine, one sentence each."""
        return ()

    def title(self, config: Any) -> str:
        """The head's kind as people name it, its variant included."""
        return self.kind.title

    def warnings(self, head: Any, target: ModelConfig) -> Iterable[str]:
        """Warnings about facts that are certain from a head's files and may cost acceptance."""
        return ()

    def with_taps(self, head: Any, taps: tuple[int, ...], target: ModelConfig) -> Head:
        """Make the head read other layers of the target, with unchanged weights; changes the head in place.

        Raises:
            ConfigError: it has no taps to choose, another number of them, or the target has no such layer.
        """
        choose = [kind.title for kind in kinds.kinds() if kind.taps]
        raise ConfigError(
            f"this head reads the target's last hidden state; only {' and '.join(choose)} has taps to choose"
        )

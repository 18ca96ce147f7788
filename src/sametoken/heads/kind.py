"""Interface of a kind of drafter with weights: recognise, read, write and explain files, and build the drafter.

`Kind.drafts` refers to a subclass. Code that reads, serves, exports or explains heads calls these methods and never
compares the kind.
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
    """Protocol of the configuration of a head.

    Attributes:
        kind: name of the kind.
        dtype: torch name of the dtype of the saved weights.
    """

    @property
    def kind(self) -> str: ...

    @property
    def dtype(self) -> str: ...


class Head(nn.Module, ABC):
    """Base class of modules that draft from the target's hidden states, in training and in serving.

    Attributes:
        config: configuration of the head.
        dtype: dtype of weights and activations.
    """

    config: Any  # configuration class of the kind, a `HeadConfig`
    dtype: torch.dtype

    @property
    @abstractmethod
    def draft_ids(self) -> Tensor:
        """Target's id, [Vd] int64, of every token that the head can guess."""


class Reading(NamedTuple):
    """Interpretation of the layer ids of a head: target layers (0-based outputs of blocks), and its name."""

    taps: tuple[int, ...]
    name: str


# Engines that heads are exported for, by layout; `hf` is our own, which the others read as far as they support it.
# Sources: code of vLLM 0.33, SGLang 0.5.23, TensorRT-LLM's PyTorch models (2026) and speculators 0.9.
ENGINES = {
    "hf": "sametoken",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "speculators": "speculators",
}
NO_SUCH_DRAFTS = "it has no such drafts"  # reason for kinds that an engine lacks
LAST_STATE = (Reading((), "the only one"),)  # for heads that read the last hidden state


@dataclass(frozen=True)
class Described:
    """Description of a head from its files.

    Attributes:
        config: configuration of the head.
        producer: tool that has probably written the files.
        notes: assumptions made, one sentence each.
        facts: names and values as text, in the order of display.
        readings: possible interpretations of layer ids, the chosen one first.
    """

    config: HeadConfig
    producer: str
    notes: tuple[str, ...]
    facts: Mapping[str, str]
    readings: tuple[Reading, ...] = LAST_STATE


class Written(NamedTuple):
    """Files of a head to write.

    Attributes:
        config: content of config.json.
        tensors: tensors by their names in the file, quantised weights as `Coded`.
        file: name of the weight file.
    """

    config: dict[str, Any]
    tensors: Mapping[str, Tensor | Coded]
    file: str


class Weighted(ABC):
    """Interface for serving a kind of drafts with weights.

    Attributes:
        shortens: true if the drafter may read a part of a long text, see `drafters.reading`.
        narrows: true if the drafter maps the outputs of a narrowed decoder to tokens, see `Decoder.narrowed`.
    """

    shortens = False
    narrows = False

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def cached_layers(self, module: Any) -> ModelConfig | None:
        """Configuration of the blocks with KV in the target's pages, None if there are none."""
        return None

    def most_nodes(self, config: SpeculativeConfig, module: Any) -> int:
        """Most cache slots past the pending token that a draft may take."""
        return config.most_nodes

    @abstractmethod
    def build(self, config: SpeculativeConfig, module: Any, target: Decoder, cache_for: CacheFor) -> Drafter:
        """Build the drafter of a module.

        Args:
            target: model to draft for.
            cache_for: function that makes a KV cache of such blocks in the engine's pages.
        """


class HeadKind(Weighted):
    """Interface of a kind of head: files in the layout of every engine, module and drafter."""

    @abstractmethod
    def recognises(self, files: Files) -> bool:
        """True if a directory contains a head of this kind, by the names of its tensors and its config.json."""

    @abstractmethod
    def describe(self, files: Files, target: ModelConfig) -> Described:
        """Describe a head from its files.

        Raises:
            CheckpointError: config.json lacks a fact or contradicts the tensors.
            UnsupportedModelError: a part of the head is not implemented.
            DraftMismatchError: the head was made for another target, or is of another kind than it declares.
        """

    @abstractmethod
    def empty(self, config: Any, dtype: torch.dtype, format: WeightFormat | None = None) -> Head:
        """Create a head of this configuration without setting its weights.

        Args:
            format: format to which linears are quantised when packed, None for no quantisation.
        """

    @abstractmethod
    def fill(
        self, head: Any, stored: Iterator[Stored | Item], files: Files, device: torch.device | str, *, pack: bool
    ) -> None:
        """Load stored tensors into an empty head on the meta device, and pack its linears if `pack`.

        Weights that another tool quantised are one item each; `checkpoint.fill.load_parameters` loads them.

        Raises:
            CheckpointError: tensors are missing, unexpected or damaged.
        """

    def reads(self, config: Any, name: str) -> bool:
        """True if the head may need the stored tensor `name`; others are not read."""
        return True

    @abstractmethod
    def lay_out(self, head: Any, target: ModelConfig, layout: str, target_name: str) -> Written:
        """Files of a head for the engine with key `layout` in `ENGINES`; does not check `refusals`."""

    def refusals(self, config: Any, layout: str, tensors: Mapping[str, Tensor | Coded] | None = None) -> list[str]:
        """Reasons why an engine cannot run a head as it was trained; empty if it can.

        Args:
            tensors: tensors of the head in our own layout, for parts whose use depends on values; None if unknown, and
                then such parts count as used.
        """
        return [] if layout == "hf" else [NO_SUCH_DRAFTS]

    def advice(self, config: Any, layout: str) -> tuple[str, ...]:
        """Advice for serving an exported head with an engine, one sentence each."""
        return ()

    def title(self, config: Any) -> str:
        """Common name of the head's kind, variant included."""
        return self.kind.title

    def warnings(self, head: Any, target: ModelConfig) -> Iterable[str]:
        """Warnings about properties of a head's files that may cost acceptance."""
        return ()

    def with_taps(self, head: Any, taps: tuple[int, ...], target: ModelConfig) -> Head:
        """Change, in place, the layers of the target that the head reads; weights are unchanged.

        Raises:
            ConfigError: the head has no taps to choose, another number of taps, or the target has no such layer.
        """
        choose = [kind.title for kind in kinds.kinds() if kind.taps]
        raise ConfigError(
            f"this head reads the target's last hidden state; only {' and '.join(choose)} has taps to choose"
        )

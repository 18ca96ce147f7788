"""Common training objective of all kinds of heads on a frozen target; subclasses define the guesses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from sametoken.checkpoint.places import draft_directory
from sametoken.checkpoint.quantised.write import StoredFormat
from sametoken.errors import ConfigError
from sametoken.heads.kind import Head
from sametoken.heads.modelopt import ModelOptNames
from sametoken.heads.modules import check_groups, linears, round_linears
from sametoken.heads.read import read_head
from sametoken.heads.registry import head_kind
from sametoken.heads.write import write_head
from sametoken.kinds import kinds
from sametoken.learning.batch import Batch
from sametoken.learning.loss import AcceptanceMetrics, Teacher
from sametoken.learning.objective import STD, Objective, Start, computing_in
from sametoken.learning.target import Features, OuterLayers
from sametoken.model.config import ModelConfig
from sametoken.model.formats.straight import FakeRounding
from sametoken.options.training import RoundedLoss


class HeadObjective(Objective):
    """Training objective of a head.

    Args:
        head: head in float32 with unpacked linears, and its configuration as `config`.
        loss: settings of the loss of its kind.
        target_name: name of the target for readers of the head's files.

    Attributes:
        modelopt: ModelOpt's names of its options.
    """

    modelopt = ModelOptNames()
    head: Any  # a `Head` of its kind

    def __init__(
        self, head: Head, outer: OuterLayers, loss: Any, dtype: torch.dtype, *, recompute: bool = False,
        target_name: str = "",
    ) -> None:  # fmt: skip
        super().__init__(outer, loss, dtype, recompute=recompute)
        self._target_name, self.head = target_name, head
        if isinstance(loss, RoundedLoss) and loss.quantize_aware is not None:
            self.stored = StoredFormat(loss.quantize_aware, loss.quantize_group_size)
            check_groups(head, self.stored.rounding)
            for linear in linears(head).values():
                linear.trained = FakeRounding(self.stored.rounding)
        self.draft_ids = head.draft_ids.to(outer.head.device)
        for parameter in head.parameters():
            parameter.requires_grad_(True)

    @classmethod
    @abstractmethod
    def configure(
        cls, settings: Any, target: ModelConfig, vocabulary: int, architecture: Mapping[str, Any] | None = None
    ) -> Any:
        """Configuration of a head from settings.

        Args:
            vocabulary: number of tokens that the head can guess.
            architecture: keys of config.json in place of the file that the settings name, which then is not read.

        Raises:
            ConfigError: a key is unknown or contradicts the target.
        """

    @classmethod
    def create(
        cls, config: Any, target_head: Tensor, draft_ids: Tensor | None, generator: torch.Generator, std: float = STD
    ) -> Head:
        """Create a head of this configuration on the device of `target_head` [V, Ht], in float32.

        Matrices are random with standard deviation `std`, norms ones and biases zeros, except for changes by
        `first_weights`.
        """
        with torch.device(target_head.device):
            head = head_kind(config).empty(config, torch.float32)
        cls.restrict(head, draft_ids)
        cls.first_weights(head, target_head, generator, std)
        return head

    @classmethod
    def first_weights(cls, head: Head, target_head: Tensor, generator: torch.Generator, std: float = STD) -> None:
        """Initialise the weights in place."""
        for name, parameter in head.named_parameters():
            if parameter.dim() == 1:
                parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.data.normal_(0.0, std, generator=generator)

    @classmethod
    def restrict(cls, head: Any, draft_ids: Tensor | None) -> None:
        """Restrict a new head to a draft vocabulary [Vd], for kinds that support one; None for all tokens."""
        assert draft_ids is None

    @classmethod
    def compare(cls, head: Any, start: Start) -> None:
        """Raise for settings that contradict the existing head from which training starts."""

    @classmethod
    def new(cls, start: Start) -> Self:
        settings, target = start.head, start.outer.config
        if settings.init_from is None:
            size = target.vocab_size if start.draft_ids is None else len(start.draft_ids)
            config = cls.configure(settings, target, size)
            generator = torch.Generator(start.outer.head.device).manual_seed(start.seed)
            head = cls.create(config, start.outer.head, start.draft_ids, generator)
        else:
            place = draft_directory(str(settings.init_from))
            head = read_head(place, target, torch.float32, start.outer.head.device, pack=False).module
            if (found := head.config.kind) != start.kind:
                modes = {kind.name: kind.aliases["train"][0] for kind in kinds() if kind.objective}
                mode = modes.get(found, found)
                raise ConfigError(f"--init-from {settings.init_from} is of kind {mode}, but --mode is {settings.mode}")
            cls.compare(head, start)
        return cls(head, start.outer, start.loss, start.dtype, recompute=start.recompute, target_name=start.target_name)

    def forward(self, batch: Batch, features: Features, weights: Tensor) -> tuple[Tensor, AcceptanceMetrics]:
        teacher = Teacher(features.last, self.outer.head, batch.ahead(1), self.draft_ids, self.outer.config.logits_cap)
        for linear in linears(self.head).values():
            if isinstance(linear.trained, FakeRounding):
                linear.trained.renew(linear.weight)
        with computing_in(self.dtype, self.outer.head.device):
            return self.minimised(batch, features, teacher, weights)

    @abstractmethod
    def minimised(
        self, batch: Batch, features: Features, teacher: Teacher, weights: Tensor
    ) -> tuple[Tensor, AcceptanceMetrics]:
        """Loss and metrics of the guesses for `forward`, which has set the dtype of matrix products."""

    def write(self, place: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        whole = head_kind(self.head.config).empty(self.head.config, torch.float32)
        whole.load_state_dict({name.removeprefix("head."): value for name, value in weights.items()})
        if self.stored is not None:
            round_linears(whole, self.stored.rounding)  # float32 weights of training
        write_head(
            whole, place, self.outer.config, target_name=self._target_name, dtype=dtype or self.stored_dtype,
            stored=self.stored,
        )  # fmt: skip


def refuse_other(start: Start, option: str, own: Any, asked: Any) -> None:
    """Raise if an option differs from the head from which training starts."""
    if asked != own:
        raise ConfigError(
            f"--init-from {start.head.init_from} has {option} {own}, got {asked}; its architecture is kept"
        )


class FixedTrees(Protocol):
    """Objective of a kind whose heads have static trees."""

    @classmethod
    def best_tree(
        cls, head: Any, outer: OuterLayers, texts: Iterable[tuple[Tensor, Tensor, int]], nodes: int
    ) -> tuple[tuple[int, ...], ...]:
        """Paths of the nodes that are correct most often, parents before children.

        Args:
            texts: for each text, tokens [S], the target's last normed states [S, H], and the start of the answer.
            nodes: most nodes.
        """
        ...

    @classmethod
    def with_tree(cls, head: Any, paths: tuple[tuple[int, ...], ...]) -> Head:
        """Set the tree of a head in place, and return the head."""
        ...

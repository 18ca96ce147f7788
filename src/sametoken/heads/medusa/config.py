"""Configuration of Medusa heads. Source: FasterDecoding/Medusa."""

from __future__ import annotations

from dataclasses import dataclass

from sametoken.heads.checks import check


@dataclass(frozen=True)
class MedusaConfig:
    """Configuration of Medusa heads, which guess the tokens after the target's own next one.

    Attributes:
        num_heads: number of heads; head i guesses the token i + 2 places after its input.
        num_layers: independent residual blocks of a head.
        own_heads: true if each head has an output layer; otherwise all use the target's.
        dtype: torch name of the dtype of the saved weights.
        choices: static tree: each node as the ranks of its path, parents before children; () for a chain of rank 0.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    own_heads: bool = True
    dtype: str = "bfloat16"
    choices: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "hidden_size", "vocab_size"):
            least = 0 if name == "num_layers" else 1
            check(getattr(self, name) >= least, f"medusa_{name}", getattr(self, name), f"at least {least}")
        known: set[tuple[int, ...]] = {()}
        for path in self.choices:
            check(path[:-1] in known, "medusa_choices", path, "its parent before it")
            check(len(path) <= self.num_heads, "medusa_choices", path, f"at most {self.num_heads} ranks, one per head")
            known.add(path)

    @property
    def kind(self) -> str:
        """Name of the kind."""
        return "medusa"

    @property
    def tree(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of a draft without its root, parents before children."""
        return self.choices or tuple((0,) * depth for depth in range(1, self.num_heads + 1))

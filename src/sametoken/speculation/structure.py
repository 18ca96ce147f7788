"""What the form of an output may be asked to be, and the protocol of whoever keeps it. No grammar library here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from sametoken.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form of an output; exactly one is given. Names are vLLM's.

    Attributes:
        json: a JSON schema.
        json_object: any JSON object.
        regex: a regular expression that the whole output matches.
        choice: texts of which the output is one.
        grammar: a context-free grammar in Lark's notation.
        after: regular expression of text in the output after which the form begins, such as a model's mark for the end
            of its thinking, which ends with ">"; None is at once.
        opens: text that the output may begin with; only then is `after` waited for. None always waits.

    Raises:
        RequestError: a field has the wrong type, or none or several are given.
    """

    json: Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    after: str | None = None
    opens: str | None = None

    def __post_init__(self) -> None:
        forms = [field.name for field in fields(self) if field.name not in ("after", "opens")]
        given = [name for name in forms if getattr(self, name) not in (None, False)]
        if self.json is False:
            given.append("json")
        if len(given) != 1:
            names = ", ".join(given) or "nothing"
            raise RequestError(
                f"got {names}, expected one of json, json_object, regex, choice, grammar", field="structured_outputs"
            )
        self._check("json", isinstance(self.json, Mapping | bool | None), "a JSON schema")
        self._check("json_object", isinstance(self.json_object, bool), "true or false")
        self._check("regex", isinstance(self.regex, str | None), "a regular expression")
        self._check("grammar", isinstance(self.grammar, str | None), "a grammar in Lark's notation")
        texts = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
        listed = texts and all(isinstance(text, str) and text for text in self.choice or ())
        self._check("choice", self.choice is None or (listed and bool(self.choice)), "texts that are not empty")

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            got = str(getattr(self, name))[:80]
            raise RequestError(f"got {got!r}, expected {expected}", field="structured_outputs", place=f".{name}")


class Grammar(Protocol):
    """What one sequence may still say; its state is that after all tokens told to `accept`."""

    @property
    def failure(self) -> RequestError | None:
        """Why it could not be kept to the end, or None."""
        ...

    def accept(self, token: int) -> bool:
        """Told of an emitted token; whether nothing may follow it."""
        ...

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Which tokens may follow each node of a draft tree, on the node's own path; the state stays.

        Args:
            tokens, parents: of N nodes; node 0 was told to `accept` already.

        Returns:
            [N, V] bool; what follows a node that is itself not allowed means nothing. Nothing may follow a node for
            whose mask there was no time; nothing may follow node 0 once there is a `failure`.
        """
        ...

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens that the form leaves no choice about, as the tokenizer would spell them."""
        ...


def confine(scores: Tensor, tokens: Tensor, parents: Tensor, grammars: Sequence[Grammar | None]) -> None:
    """Bans in place what a row's grammar does not allow after each node.

    Args:
        scores: [B, N, V].
        tokens, parents: [B, N] the draft; one of them is read by the host per call.
        grammars: one per row, None where everything is allowed.
    """
    nodes, above = tokens.tolist(), parents.tolist()
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            allowed = grammar.allowed(nodes[row], above[row]).to(scores.device)
            scores[row].masked_fill_(~allowed, float("-inf"))

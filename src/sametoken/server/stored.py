"""Responses that were made, for requests that refer to them: bounded in number and size, the oldest leave first.

A response is known to requests with the API key of the one that made it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sametoken.server.errors import ApiError
from sametoken.server.exchange import CURRENT
from sametoken.server.text_request import Turn

MOST_BYTES = 2**26  # of all responses and the conversations before them
UNDER_WAY = ("queued", "in_progress")
_Place = tuple[str, str]  # whose response, and its id


@dataclass(slots=True)
class StoredResponse:
    """A response.

    Attributes:
        response: the object. `turns`: the conversation that it ends, without instructions.
        stop: ends the work on one that is being made in the background.
    """

    response: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)
    stop: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        """Characters that it has, about."""
        said = sum(len(turn.content or "") + len(turn.thought or "") + len(str(turn.calls)) for turn in self.turns)
        return len(str(self.response)) + said


class ResponseStore:
    """The last responses of a server.

    Args:
        most: number of them.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._known: OrderedDict[_Place, tuple[StoredResponse, int]] = OrderedDict()

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, in the place of an earlier one with its id."""
        place, size = _place(stored.response["id"]), stored.size
        self._drop(place)
        self._known[place], self._bytes = (stored, size), self._bytes + size
        while self._known and (len(self._known) > self._most or self._bytes > MOST_BYTES):
            self._drop(next(iter(self._known)))

    def drop(self, id_: str) -> None:
        """Forget a response, if it is known."""
        self._drop(_place(id_))

    def _drop(self, place: _Place) -> None:
        if place in self._known:
            self._bytes -= self._known.pop(place)[1]

    def find(self, id_: str, param: str) -> StoredResponse:
        """The response of an id.

        Args:
            param: where the client named it.

        Raises:
            ApiError: there is none.
        """
        if (place := _place(id_)) not in self._known:
            words = f"Response with id {id_[:100]!r} not found. The last {self._most} are kept, unless store is false"
            raise ApiError(404, words, "not_found_error", param=param, code="response_not_found")
        return self._known[place][0]

    def conversation(self, id_: str) -> list[Turn]:
        """The turns up to the end of a response that another one follows.

        Raises:
            ApiError: there is no such response, or it is not complete.
        """
        stored, field_ = self.find(id_, "previous_response_id"), "previous_response_id"
        if not stored.turns:
            words = f"{field_}: the response is {stored.response['status']}; expected one that is complete"
            raise ApiError(400, words, param=field_)
        return stored.turns

    def cancel(self, id_: str) -> dict[str, Any]:
        """End the work on a response that is made in the background; return it.

        Raises:
            ApiError: there is no such response, or it was never made in the background.
        """
        stored = self.find(id_, "response_id")
        if not stored.response["background"]:
            raise ApiError(400, "Cannot cancel a synchronous response.", param="response_id")
        if stored.stop is not None and stored.response["status"] in UNDER_WAY:
            stored.response["status"] = "cancelled"
            stored.stop()
        return stored.response


def _place(id_: str) -> _Place:
    """Key under which a response is stored: the owner of the current request and the response's id."""
    exchange = CURRENT.get()
    return ("" if exchange is None else exchange.owner, id_)

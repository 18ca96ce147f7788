"""Store of responses for later requests that refer to them, limited in number and bytes.

The oldest complete ones are dropped; none under way is. Only requests with the API key of a response can refer to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sametoken.server.errors import ApiError
from sametoken.server.exchange import CURRENT
from sametoken.server.text_request import Turn

MOST_BYTES = 2**26  # size of all responses and the conversations before them
UNDER_WAY = ("queued", "in_progress")
_Place = tuple[str, str]  # owner and id of a response


@dataclass(slots=True)
class StoredResponse:
    """A response.

    Attributes:
        response: object of the response.
        turns: conversation up to the end of the response, without instructions; empty until it is complete.
        stop: function that ends the work on a response in the background; None for other responses.
    """

    response: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)
    stop: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        """Approximate number of characters."""
        turns = sum(len(turn.content or "") + len(turn.thought or "") + len(str(turn.calls)) for turn in self.turns)
        return len(str(self.response)) + turns


class ResponseStore:
    """Last responses of a server.

    Args:
        most: largest number of responses.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._known: OrderedDict[_Place, tuple[StoredResponse, int]] = OrderedDict()

    def put(self, stored: StoredResponse) -> None:
        """Store a response; it replaces an earlier one with its id."""
        place, size = _place(stored.response["id"]), stored.size
        self._drop(place)
        self._known[place], self._bytes = (stored, size), self._bytes + size
        while self._known and (len(self._known) > self._most or self._bytes > MOST_BYTES):
            complete = (each for each, (one, _) in self._known.items() if one.response["status"] not in UNDER_WAY)
            if (oldest := next(complete, None)) is None:  # those under way are limited by the queue
                return
            self._drop(oldest)

    def drop(self, id_: str) -> None:
        """Remove a response if it is stored."""
        self._drop(_place(id_))

    def _drop(self, place: _Place) -> None:
        if place in self._known:
            self._bytes -= self._known.pop(place)[1]

    def find(self, id_: str, param: str) -> StoredResponse:
        """Stored response with an id.

        Args:
            param: field or path parameter with the id, for the error.

        Raises:
            ApiError: no response of the client has the id.
        """
        if (place := _place(id_)) not in self._known:
            words = f"Response with id {id_[:100]!r} not found. The last {self._most} are kept, unless store is false"
            raise ApiError(404, words, "not_found_error", param=param, code="response_not_found")
        return self._known[place][0]

    def conversation(self, id_: str) -> list[Turn]:
        """Turns up to the end of a response, for a request that continues it.

        Raises:
            ApiError: there is no such response, or it is not complete.
        """
        stored, field_ = self.find(id_, "previous_response_id"), "previous_response_id"
        if not stored.turns:
            words = f"{field_}: the response is {stored.response['status']}; expected one that is complete"
            raise ApiError(400, words, param=field_)
        return stored.turns

    def cancel(self, id_: str) -> dict[str, Any]:
        """End the work on a response in the background, and return its object.

        Raises:
            ApiError: there is no such response, or it was not made in the background.
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

"""llama-server's slots: the places of the batch, and saved KV caches of their last sequences.

A slot is only a name for a request's sequence: the prefix cache finds a prompt by its tokens, independent of the place.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from sametoken.engine.request import Request, salt_of
from sametoken.engine.saved import give, keep, read, write
from sametoken.errors import DataError
from sametoken.options.speculation import NO_DRAFT
from sametoken.server.api import Api
from sametoken.server.errors import ApiError, not_supported
from sametoken.server.exchange import CURRENT
from sametoken.server.fields import Body
from sametoken.server.worker import Worker

FILE_NAME = re.compile(r"(?!\.)[\w.-]{1,200}", re.ASCII)
REMEMBERED = 4  # recorded requests for each place of the batch


class SlotRequest(Body):
    """The body of POST /slots/ID."""

    model_config = ConfigDict(extra="ignore")
    model: str | None = None
    """any name."""
    filename: str | None = None
    """name of the file in --slot-save-path, without a folder."""


class Held(NamedTuple):
    """Sequence that has a slot.

    Attributes:
        asked: slot that the client chose; None for the place in the batch.
        request: request of the sequence; None if a file had the sequence.
        tokens: tokens of prompt and output, which grow while the request runs.
        owner: owner of the sequence, see `Request`.
        salt: salt of the sequence in the prefix cache, see `Request`.
    """

    asked: int | None
    request: Request | None
    tokens: list[int]
    owner: str
    salt: bytes

    @property
    def slot(self) -> int:
        """Number of the slot."""
        return (self.request and self.request.last_row) or 0 if self.asked is None else self.asked


class Slots:
    """Record of the last sequences with their slots.

    Args:
        places: number of places of the batch.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._last = deque[Held](maxlen=REMEMBERED * places)

    def note(self, asked: int | None, requests: Sequence[Request]) -> None:
        """Record a client's requests under its `id_slot`, or under their places in the batch.

        Numbers beyond the last slot start over, as in llama-server.
        """
        given = None if asked is None or asked < 0 else asked % self._places
        self._last.extend(Held(given, request, request.tokens, request.owner, request.salt) for request in requests)

    def of(self, request: Request) -> int:
        """Slot of a request."""
        return next((held.slot for held in self._last if held.request is request), request.last_row or 0)

    def last(self, slot: int, owner: str) -> Held | None:
        """Last recorded sequence of an owner in a slot, or None."""
        found = (held for held in reversed(self._last) if held.slot == slot and held.owner == owner)
        return next(found, None)

    def restored(self, slot: int, tokens: list[int], owner: str) -> bytes:
        """Record a sequence from a file as the owner's last one in a slot; return its salt in the prefix cache."""
        self._last.append(Held(slot, None, tokens, owner, salt_of(owner, "")))
        return self._last[-1].salt


class SlotApi(Api):
    """Endpoints of the slots.

    Args:
        worker, names: see `Api`.
        slots: record of the sequence in each slot.
    """

    def __init__(self, worker: Worker, names: Sequence[str], slots: Slots) -> None:
        super().__init__(worker, names)
        self._slots = slots

    def _check_model(self, model: str | None) -> None:
        """Accept any name, because there is one model."""

    async def show(self) -> Response:
        """State of each place of the batch."""
        if not self._worker.config.slots:
            raise not_supported("this server does not show its slots; start it without --no-slots")
        llm = self._worker.llm
        busy = {request.row: request for request in self._worker.requests if request.row is not None}
        found = []
        for slot in range(llm.engine.max_batch_size):
            request = busy.get(slot)
            about: dict[str, Any] = {"id": slot, "n_ctx": llm.max_seq_len, "speculative": llm.method != NO_DRAFT,
                     "is_processing": request is not None}  # fmt: skip
            if request is not None:
                about["id_task"] = request.id
                about["next_token"] = [{"n_remain": -1, "n_decoded": len(request.tokens) - len(request.prompt_ids)}]
            found.append(about)
        return JSONResponse(found)

    async def change(self, request: HttpRequest) -> Response:
        """Save, restore or erase the cached pages of a slot's last sequence."""
        place, worker = self._worker.config.slot_save_path, self._worker
        if place is None:
            raise not_supported("this server saves no slots; start it with --slot-save-path DIRECTORY")
        if worker.llm.ranks is not None:
            raise not_supported("a model that several processes compute saves no slots")
        named, most = request.path_params["slot"], worker.llm.engine.max_batch_size
        if not (named.isascii() and named.isdigit() and len(named) < 10):
            raise ApiError(400, f"got slot {named[:40]!r}, expected 0 to {most - 1}", param="id_slot")
        slot, action = int(named) % most, request.query_params.get("action", "")
        if action == "erase":
            return await self._erase(slot)
        if action not in ("save", "restore"):
            raise ApiError(400, f"got action {action[:40]!r}, expected save, restore or erase", param="action")
        name = (await self._read(request, SlotRequest)).filename or ""
        if not FILE_NAME.fullmatch(name):
            raise ApiError(400, f"filename: got {name[:100]!r}, expected letters, digits and ._- ", param="filename")
        try:
            return await (self._save if action == "save" else self._restore)(slot, Path(place) / name)
        except DataError as error:
            raise ApiError(400, str(error), param="filename") from error

    async def _save(self, slot: int, file: Path) -> Response:
        llm, begun = self._worker.llm, time.perf_counter()
        if (held := self._slots.last(slot, self._owner)) is None:
            raise ApiError(400, f"slot {slot} has no sequence; send a request with id_slot {slot} first")
        kept = await self._worker.engine.call(lambda: keep(llm.engine, list(held.tokens), held.salt))
        size = await asyncio.to_thread(lambda: write(kept, file, llm.fingerprint()))
        counts = {"n_saved": kept.cached(llm.engine.table.page_size), "n_written": size}
        return _answer(slot, file, counts, "save_ms", begun)

    async def _restore(self, slot: int, file: Path) -> Response:
        llm, begun = self._worker.llm, time.perf_counter()
        kept, size = await asyncio.to_thread(lambda: read(llm.engine, file, llm.fingerprint()))
        salt = self._slots.restored(slot, kept.tokens, self._owner)
        await self._worker.engine.call(lambda: give(llm.engine, kept, salt))
        counts = {"n_restored": kept.cached(llm.engine.table.page_size), "n_read": size}
        return _answer(slot, file, counts, "restore_ms", begun)

    async def _erase(self, slot: int) -> Response:
        blocks, held, erased = self._worker.llm.engine.scheduler.blocks, self._slots.last(slot, self._owner), 0
        if held is not None:
            erased = await self._worker.engine.call(lambda: blocks.erase(list(held.tokens), held.salt))
        return JSONResponse({"id_slot": slot, "n_erased": erased})

    @property
    def _owner(self) -> str:
        """Owner of the sequences that the client may use: those of requests with its own key."""
        exchange = CURRENT.get()
        return "" if exchange is None or self._worker.config.share_between_keys else exchange.owner


def _answer(slot: int, file: Path, counts: dict[str, int], name: str, begun: float) -> Response:
    took = {"timings": {name: 1e3 * (time.perf_counter() - begun)}}
    return JSONResponse({"id_slot": slot, "filename": file.name, **counts, **took})

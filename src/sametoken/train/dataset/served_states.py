"""Hidden states computed by vLLM servers, which run samples as prompts and write files, which are read and removed.

Servers run with vLLM's method `extract_hidden_states` and write to a directory shared with this machine. Legend:
S tokens of a sample, n taps, H hidden size.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sametoken.client.client import Client, RemoteError, all_together
from sametoken.errors import DataError

TIMEOUT_S = 600.0  # seconds without a byte of an answer
RETRIES = 4
PLACE = "hidden_states_path"  # in vLLM's answer


class WantedStates(NamedTuple):
    """Specification of the hidden states that servers compute.

    Attributes:
        taps: 0-based blocks whose outputs are returned.
        layers: number of blocks of the target.
        hidden_size: H.
        dtype: dtype in which servers run.
        norm: final norm of the target; servers return its input.
    """

    taps: tuple[int, ...]
    layers: int
    hidden_size: int
    dtype: torch.dtype
    norm: Callable[[Tensor], Tensor]

    @property
    def layer_ids(self) -> list[int]:
        """Ascending values of vLLM's `eagle_aux_hidden_state_layer_ids`: number i is the input of block i."""
        return sorted({*(tap + 1 for tap in self.taps), self.layers})

    def states(self, found: dict[str, Tensor], tokens: Tensor) -> Tensor:
        """Hidden states [S, n + 1, H] from a server's file for `tokens` [S].

        Raises:
            DataError: the file is for other tokens, layers or another dtype.
        """
        given, ids = found.get("hidden_states"), found.get("token_ids")
        if given is None or ids is None:
            raise DataError(f"it holds {', '.join(sorted(found)) or 'nothing'}; expected hidden_states and token_ids")
        if ids.tolist() != tokens.tolist():
            raise DataError(f"its {len(ids)} tokens are not the {len(tokens)} of the prompt; expected the same")
        expected = (len(tokens), len(self.layer_ids), self.hidden_size)
        if given.shape != expected:
            raise DataError(
                f"its shape is {tuple(given.shape)}, expected {expected}; start the server with "
                f"eagle_aux_hidden_state_layer_ids {self.layer_ids}"
            )
        if given.dtype != self.dtype:
            names = [str(each).removeprefix("torch.") for each in (given.dtype, self.dtype)]
            raise DataError(f"it is in {names[0]}, expected {names[1]}; run both with the same --dtype")
        places = [self.layer_ids.index(tap + 1) for tap in self.taps]
        return torch.cat([given[:, places], self.norm(given[:, -1:])], dim=1)


class ServedStates:
    """Reader of hidden states from several servers, with concurrent requests to each.

    Args:
        urls: addresses of the servers, with or without /v1.
        api_key: key of the servers.
        at_once: concurrent requests per server.
    """

    def __init__(self, urls: Sequence[str], api_key: str | None, wanted: WantedStates, at_once: int) -> None:
        self._urls, self._api_key, self._wanted, self._at_once = urls, api_key, wanted, at_once

    def __call__(self, samples: Sequence[Tensor]) -> list[Tensor]:
        """Hidden states [S, n + 1, H] of each of some samples [S], in order.

        Raises:
            ConfigError: a server cannot be reached.
            DataError: the answer of a server does not fit the specification.
        """
        return asyncio.run(self._all(samples))

    async def _all(self, samples: Sequence[Tensor]) -> list[Tensor]:
        left, found = iter(enumerate(samples)), dict[int, Tensor]()
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Client(url, self._api_key, TIMEOUT_S)) for url in self._urls]
            models = [await client.first_model(RETRIES) for client in clients]
            await all_together(
                self._work(client, model, left, found)
                for client, model in zip(clients, models, strict=True)
                for _ in range(self._at_once)
            )
        return [found[number] for number in range(len(samples))]

    async def _work(
        self, client: Client, model: str, left: Iterator[tuple[int, Tensor]], found: dict[int, Tensor]
    ) -> None:
        for number, tokens in left:
            found[number] = await self._states(client, model, tokens)

    async def _states(self, client: Client, model: str, tokens: Tensor) -> Tensor:
        body = {"model": model, "prompt": tokens.tolist(), "max_tokens": 1, "temperature": 0.0}
        where = client.where("completions")
        try:
            answer = await client.answer("completions", body, RETRIES)
        except RemoteError as error:
            raise DataError(f"{where}: {error}") from error
        place = (answer.body.get("kv_transfer_params") or {}).get(PLACE)
        if not isinstance(place, str):
            raise DataError(
                f"{where} names no file of hidden states; start vLLM with the method extract_hidden_states and the "
                "connector ExampleHiddenStatesConnector, see docs/data-generation.md"
            )
        try:
            return self._wanted.states(await asyncio.to_thread(_taken, Path(place)), tokens)
        except DataError as error:
            raise DataError(f"{place}, which {where} wrote: {error}") from error


def _taken(file: Path) -> dict[str, Tensor]:
    """Wait for a server's file to be complete, return its tensors, and remove the file."""
    lock = file.with_name(f"{file.name}.lock")
    try:
        with suppress(FileNotFoundError), lock.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)
        found: dict[str, Tensor] = load_file(file)
    except FileNotFoundError as error:
        raise DataError("it is not here; expected a directory (shared_storage_path) that this machine sees") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"it cannot be read ({error})") from error
    for each in (file, lock):
        each.unlink(missing_ok=True)
    return found

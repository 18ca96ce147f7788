"""vLLM's connector for hidden states on a CPU: its own copies them through CUDA events and pinned memory."""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes the file at once; all else is vLLM's."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        written = self.__dict__.setdefault("written", set())
        if self.has_connector_metadata():
            for pending in self._get_connector_metadata().pending_saves:
                self._write(pending)
                written.add(pending.req_id)
        self._accumulated_finished_req_ids |= finished_req_ids
        done = self._accumulated_finished_req_ids & written
        self._accumulated_finished_req_ids -= done
        return done or None, None

    def _write(self, pending: Any) -> None:
        size = self._block_size
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()[: len(pending.token_ids)]
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids}, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))

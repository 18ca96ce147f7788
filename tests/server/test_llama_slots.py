"""POST /slots/ID: what a prompt left in the cache is saved, restored by another server, and erased."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli_checks import Pair
from sametoken import LLM
from sametoken.errors import ConfigError
from sametoken.options.server import ServerConfig
from sametoken.server.listen import check
from server_checks import Running, running

ASKED = {"prompt": "the quick brown fox jumps over the lazy dog", "seed": 4, "n_predict": 8, "id_slot": 3}


def engine_of(pair: Pair) -> LLM:
    return LLM(pair.target, kv_cache={"tokens_per_block": 8})


def act(served: Running, slot: object, action: str, status: int = 200, **body: Any) -> Any:
    answer = served.post(f"/slots/{slot}?action={action}", body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_prompt_is_read_once(tiny_pair: Pair, tmp_path: Path, one_thread: None) -> None:
    settings: dict[str, Any] = {"any_model": True, "slot_save_path": str(tmp_path)}
    with running(engine_of(tiny_pair), **settings) as first:
        said = first.post("/completion", ASKED).json()
        assert (said["id_slot"], said["timings"]["cache_n"]) == (3, 0)
        saved = act(first, 3, "save", filename="fox.bin")
        assert saved["n_written"] == (tmp_path / "fox.bin").stat().st_size
        act(first, 2, "save", 400, filename="none.bin")
        assert act(first, 3, "erase")["n_erased"] == saved["n_saved"]
        assert first.post("/completion", ASKED).json()["timings"]["cache_n"] == 0
    with running(engine_of(tiny_pair), **settings) as second:
        restored = act(second, 1, "restore", filename="fox.bin")
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        again = second.post("/completion", ASKED).json()
        assert again["timings"]["cache_n"] > 0
        assert again["content"] == said["content"]
        assert act(second, 1, "save", filename="same.bin")["n_saved"] == saved["n_saved"]  # the slot has it now
        chat = {"messages": [{"role": "user", "content": "x"}], "id_slot": 5}
        if second.post("/chat/completions", chat).status_code == 200:
            assert "n_erased" in act(second, 5, "erase")


def test_slots_start_over_after_the_last_one(tiny_pair: Pair, tmp_path: Path, one_thread: None) -> None:
    with running(engine_of(tiny_pair), any_model=True, slot_save_path=str(tmp_path)) as served:
        assert served.post("/completion", {**ASKED, "id_slot": 99}).json()["id_slot"] == 99 % 16
        assert act(served, 99 % 16, "save", filename="a.bin")["id_slot"] == 99 % 16
        assert act(served, 99, "erase")["id_slot"] == 99 % 16


def test_what_cannot_be_done_is_said(tiny_pair: Pair, tmp_path: Path, one_thread: None) -> None:
    (tmp_path / "damaged.bin").write_bytes(b"{}\n" * 50)
    with running(engine_of(tiny_pair), slot_save_path=str(tmp_path)) as served:
        served.post("/completion", ASKED)
        for name in ("../x", "a/b", ".hidden", "", "x" * 300):
            assert "filename" in act(served, 3, "save", 400, filename=name)["error"]["message"]
        assert "truncated or altered" in act(served, 3, "restore", 400, filename="damaged.bin")["error"]["message"]
        assert "No such file" in act(served, 3, "restore", 400, filename="none.bin")["error"]["message"]
        for slot in ("9" * 10, "-1", "x", "\u0663"):
            assert "expected 0 to" in act(served, slot, "save", 400, filename="a")["error"]["message"]
        assert "action" in act(served, 3, "copy", 400)["error"]["message"]
        assert served.post("/completion", ASKED).status_code == 200
    with running(engine_of(tiny_pair)) as served:
        assert "--slot-save-path" in act(served, 0, "save", 501, filename="a")["error"]["message"]


def test_a_place_for_slots_that_is_no_directory_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"slot_save_path .*no such directory"):
        check(ServerConfig(slot_save_path=str(tmp_path / "none")))


@pytest.mark.parametrize("given", [None, -1])
def test_a_slot_is_the_place_in_the_batch_unless_it_is_asked_for(
    tiny_pair: Pair, one_thread: None, given: int | None
) -> None:
    asked = {**ASKED, "id_slot": given}
    with running(engine_of(tiny_pair)) as served:
        assert served.post("/completion", asked).json()["id_slot"] in range(16)

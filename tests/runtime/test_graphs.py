"""A step that cannot be captured is done all the same, once, and its state is what the step made of it."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from sametoken.runtime.graphs import GraphKey, Graphs

KEY = GraphKey("none", 0, 4, 512, (), torch.float32, True)


def test_a_failed_capture_lets_the_step_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    graphs, state = Graphs(torch.device("cpu")), torch.zeros(1)
    graphs.captures = True
    with patch.object(Graphs, "_capture", side_effect=torch.OutOfMemoryError("no memory")) as capture:
        for _ in range(2):
            graphs.run(KEY, lambda: state.add_(1), [state])
    assert state.item() == 2
    assert capture.call_count == 1
    assert not graphs.captures
    assert "a step of 4 rows was not captured: no memory" in caplog.text

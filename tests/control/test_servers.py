"""The controller beside the best fixed setting of each of many simulated servers."""

from __future__ import annotations

import statistics
from itertools import product

from simulated_servers import MACHINES, TEXTS, Fixed, Server

BOTH = ("host", "model")
CELLS = [("published pair", text, batch, BOTH) for text in TEXTS for batch in (1, 8)]
CELLS += [(machine, "mixed", 4, BOTH) for machine in MACHINES]


def answers(batch: int) -> int:
    return max(40, 5 * batch)


def fixed(machine: str, text: str, batch: int, methods: tuple[str, ...]) -> tuple[float, float]:
    """Seconds per token of plain decoding and of the best of all fixed settings."""
    settings = [((), 0), *product({methods, methods[:1], methods[-1:]}, (1, 2, 3, 5, 8))]
    found = [Server(machine, text, batch, methods, Fixed(*each)).run(answers(batch)) for each in settings]
    return found[0], min(found)


def test_the_controller_is_about_as_fast_as_the_best_fixed_setting() -> None:
    """From the start on, and after it has learned; and hardly ever below plain decoding."""
    cold, warm, plain = [], [], []
    for cell in CELLS:
        without, best = fixed(*cell)
        server = Server(*cell)
        first, later = server.run(answers(cell[2])), server.run(answers(cell[2]))
        cold.append(best / first)
        warm.append(best / later)
        plain.append(without / first)
        print(*cell, f"{cold[-1]:.3f} {warm[-1]:.3f} {plain[-1]:.3f}")
    assert statistics.mean(cold) >= 0.98
    assert statistics.mean(warm) >= 1.0  # requests differ, and a fixed setting is the same for all
    assert min(cold) >= 0.92
    assert min(warm) >= 0.93
    assert min(plain) >= 0.98

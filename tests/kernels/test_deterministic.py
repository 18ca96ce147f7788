"""The `deterministic` option: fixed tiles compute the same product, and the option reaches every linear."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sametoken.engine.llm import LLM
from sametoken.errors import ConfigError
from sametoken.model.linear import Embedding, Linear
from sametoken.model.product import in_tiles, linear
from sametoken.options.sampling import SamplingParams


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 130])
def test_tiles_compute_the_product_whatever_the_row_count(count: int) -> None:
    x, weight, bias = torch.randn(count, 24), torch.randn(40, 24), torch.randn(40)
    torch.testing.assert_close(in_tiles(x, 64, weight, bias), x @ weight.T + bias)


def test_a_row_in_tiles_has_the_same_bits_in_any_company() -> None:
    x, weight = torch.randn(130, 256).bfloat16(), torch.randn(640, 256).bfloat16()
    whole = in_tiles(x, 64, weight, None)
    for count in (1, 5, 64, 65, 100):
        assert torch.equal(in_tiles(x[:count], 64, weight, None), whole[:count])


def test_one_large_product_agrees_with_blocks() -> None:
    x, weight = torch.randn(100, 64), torch.randn(96, 64)
    torch.testing.assert_close(linear(x, weight, None, False, False), linear(x, weight, None, False, True))


@pytest.mark.parametrize("option", [None, True, False])
def test_the_option_reaches_every_linear(tiny_llm_dir: Path, option: bool | None) -> None:
    llm = LLM(str(tiny_llm_dir), deterministic=option)
    found = [m.deterministic for m in llm.engine.runner.decoder.modules() if isinstance(m, Linear | Embedding)]
    assert found
    assert set(found) == {option is not False}
    assert llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=4))[0].token_ids


def test_float16_on_the_cpu_needs_the_promise_given_up(tiny_llm_dir: Path) -> None:
    with pytest.raises(ConfigError, match="bfloat16 or float32"):
        LLM(str(tiny_llm_dir), device="cpu", dtype="float16")
    llm = LLM(str(tiny_llm_dir), device="cpu", dtype="float16", deterministic=False)
    assert llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=4))[0].token_ids

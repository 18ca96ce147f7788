"""The kernels of arm64, in qemu on the least processor that each is for: integers, AVX2's bits, and the engine.

`make test-thorough` runs them. `make test-arm` runs all of test_native.py, test_native_codes.py,
test_native_draw.py, test_native_heads.py and test_pack.py with them too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_native import SHAPES, Text, directory, randn, tokens

import arm_kernels
from native_checks import BUILT, EMULATED, threads, use
from sametoken import LLM, SamplingParams, SpeculativeConfig
from sametoken.checkpoint.load import load_decoder
from sametoken.kernels.cpu.library import Library
from sametoken.kernels.cpu.variant import LEAST, VARIANTS
from sametoken.model.formats.names import FORMATS
from sametoken.model.formats.packing import pack_bfloat16

__all__ = ["directory", "threads"]  # fixtures

pytestmark = pytest.mark.parametrize("threads", [2], indirect=True)
available = pytest.mark.skipif(
    bool(arm_kernels.MISSING),
    reason=f"no {' and no '.join(arm_kernels.MISSING)}: apt-get install g++-aarch64-linux-gnu qemu-user",
)
AS_AVX2 = ("neon", "neon_dot")
AVX2 = next((each for each in BUILT if each.name == "avx2"), None)
beside_avx2 = pytest.mark.skipif(AVX2 is None, reason="there is no avx2 variant here to compare with")


def emulated(test: Callable[..., None]) -> Any:
    """A test in qemu; not one of `make test`, since each variant is compiled for twenty seconds first."""
    return pytest.mark.thorough(available(test))


@pytest.fixture(params=arm_kernels.PROCESSORS)
def kernels(request: pytest.FixtureRequest) -> Library:
    return arm_kernels.load(request.param)


def test_setup_builds_what_the_library_looks_for() -> None:
    names = [name for name in VARIANTS if name.startswith("neon")]
    assert list(arm_kernels.extensions()) == names == [*reversed(arm_kernels.PROCESSORS)]
    assert LEAST["Linux", "aarch64"] == LEAST["Darwin", "arm64"] == names[-1]


@emulated
@pytest.mark.parametrize("name", ["int8", "int4", "int4_g128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_integer_formats_have_the_bits_of_plain_torch(kernels: Library, name: str, shape: tuple[int, int]) -> None:
    rule, x = FORMATS[name], randn(11, shape[1])
    x[3] = 0
    x[4] = -x[4].abs().max()  # a row of -127
    weight = randn(*shape, seed=1)
    weight[0] = 1.0  # an output of the greatest weights
    stored = rule.quantise(weight)
    assert torch.equal(kernels.linear(rule.pack(weight, None), x, torch.float32), rule.linear(x, stored))


@emulated
@beside_avx2
@pytest.mark.parametrize("kernels", AS_AVX2, indirect=True)
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_has_the_bits_of_avx2(kernels: Library, shape: tuple[int, int]) -> None:
    weight, bias, x = randn(*shape, seed=1), randn(shape[0], seed=2), randn(11, shape[1])
    only = FORMATS["int8_weight_only"]
    for packed in (pack_bfloat16(weight, bias), only.pack(weight, bias)):
        y, expected = (each.linear(packed, x, torch.float32) for each in (kernels, AVX2))
        assert torch.equal(y, expected)


@emulated
@beside_avx2
@pytest.mark.parametrize("kernels", AS_AVX2, indirect=True)
def test_a_decoder_has_the_bits_of_avx2(kernels: Library, directory: Path) -> None:
    def logits(each: Library) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            use(each, patch)
            text = Text(load_decoder(directory, torch.bfloat16, "cpu"))
            return torch.cat([text.chain(0, 0, tokens(70)), text.chain(0, 70, tokens(5, seed=2))])

    assert torch.equal(logits(kernels), logits(AVX2))


@emulated
@pytest.mark.skipif(not EMULATED, reason="takes minutes; make test-arm runs it")
def test_speculation_leaves_the_text_alone(kernels: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    use(kernels, monkeypatch)
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=7)
    prompts = ["The rain", "def f("]

    def texts(config: SpeculativeConfig | None) -> list[list[int]]:
        llm = LLM("embedded", draft="embedded-eagle3" if config else None, speculative=config)
        return [completion.token_ids for completion in llm.generate(prompts, params)]

    assert texts(SpeculativeConfig(max_draft_len=2, adaptive=False)) == texts(None)

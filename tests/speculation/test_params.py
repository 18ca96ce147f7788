"""Every field of SamplingParams is checked: good values pass unchanged, bad ones are refused by name."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest

from sametoken.errors import RequestError
from sametoken.options.sampling import RequestSpeculation, SamplingParams

GOOD = {
    "n": [1, 8],
    "temperature": [0, 0.0, -0.0, 1e-9, 2.5],
    "top_p": [1, 1.0, 0.1],
    "top_k": [-1, 0, 1, 10**6],
    "min_p": [0, 1, 0.05],
    "repetition_penalty": [1, 0.5, 1.3],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2.0, 0.1, 2],
    "logit_bias": [None, {}, {0: -100, 17: 3.5}],
    "max_tokens": [1, None, 10**6],
    "min_tokens": [0, 256],
    "ignore_eos": [True, False],
    "seed": [None, 0, -5, 2**80],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 5],
    "speculative": [None, RequestSpeculation(max_draft_len=0)],
}
BAD: dict[str, list[Any]] = {
    "n": [0, True, 1.0, "1", None],
    "temperature": [-0.1, math.nan, math.inf, True, "1", None],
    "top_p": [0, -0.5, 1.01, math.nan, False],
    "top_k": [-2, 5.0, True, math.nan],
    "min_p": [-0.01, 1.5, math.nan, None],
    "repetition_penalty": [0, -1, 1e-300, 1e300, math.nan, math.inf],
    "presence_penalty": [-2.1, 2.1, math.nan, True],
    "frequency_penalty": [-3, 3, math.nan, "0"],
    "logit_bias": [[1], {"a": 1}, {-1: 1}, {True: 1}, {1: math.nan}, {1: 101}, {1: "x"}],
    "bad_words": ["word", [""], [1], None],
    "max_tokens": [0, -1, 2.0, True],
    "min_tokens": [-1, 257, True, 1.5],
    "stop": ["", ["a", ""], [1], 5],
    "stop_token_ids": [[-1], [1.0], [True], "12", 7],
    "include_stop_str_in_output": [1, None],
    "ignore_eos": [0, "yes"],
    "seed": [1.5, True, "7"],
    "logprobs": [-1, True, 1.0],
    "prompt_logprobs": [-1, False],
    "skip_special_tokens": [1],
    "speculative": [{}, True, "none"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_good_values_pass_unchanged(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}") as refused:
        SamplingParams(**{name: value})
    assert "expected" in str(refused.value)


def test_sequences_become_tuples_and_mappings_copies() -> None:
    bias = {3: 1}
    params = SamplingParams(stop="end", bad_words=["a", "b"], stop_token_ids=[4], logit_bias=bias)
    bias[3] = 9
    assert (params.stop, params.bad_words, params.stop_token_ids) == (("end",), ("a", "b"), (4,))
    assert params.logit_bias == {3: 1.0}
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()


def test_from_mapping_reads_what_json_can_say() -> None:
    text = '{"temperature": 0, "logit_bias": {"5": -1}, "stop": ["x"], "speculative": {"enabled": false}}'
    expected = SamplingParams(
        temperature=0, logit_bias={5: -1.0}, stop="x", speculative=RequestSpeculation(enabled=False)
    )
    assert SamplingParams.from_mapping(json.loads(text)) == expected
    assert SamplingParams.from_mapping({}) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"best_of": 2}, "unknown sampling parameter 'best_of'"),
        ({"speculative": {"max_draft": 2}}, "did you mean 'max_draft_len'"),
        ({"speculative": {"max_draft_len": -1}}, "speculative.max_draft_len"),
        ({"speculative": {"enabled": 1}}, "speculative.enabled"),
        ({"speculative": {"method": 1}}, "speculative.method"),
        ({"logit_bias": {"5x": 1}}, "logit_bias key"),
        ({"logit_bias": {"5x": 1, "7": 2, "y": 1}}, r"logit_bias key: got \['5x', 'y'\]"),
    ],
)
def test_from_mapping_refuses_the_unknown(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams.from_mapping(values)


def test_params_travel_between_processes() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, speculative=RequestSpeculation(method="ngram"))
    assert pickle.loads(pickle.dumps(params)) == params

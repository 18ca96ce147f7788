"""Chat templates that run for ever, take all memory or reach for what is not theirs: each ends with one sentence."""

# ruff: noqa: E501
from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from sametoken import CheckpointError, RequestError, limited
from sametoken.checkpoint import templating
from sametoken.checkpoint.chat import read_template, render

SAID = [{"role": "user", "content": "hello"}]
DOUBLED = "{% set a = [0] %}" + "{% set a = [a, a] %}" * 40
COSTLY = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that find nothing": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "an indent": "{{ messages | tojson(indent=10**8) }}",
    "an indent of lines": "{{ ('a\n' * 10**4) | indent(10**6) }}",
    "a repeat": "{{ 'a' * 10**10 }}",
    "a repeat of a list": "{{ [0] * 10**10 }}",
    "padding to the left": "{{ 'a'.ljust(10**10) }}",
    "padding to the right": "{{ 'a'.rjust(10**10) }}",
    "padding around": "{{ 'a'.center(10**10) }}",
    "padding by a filter": "{{ 'a' | center(10**10) }}",
    "padding with zeros": "{{ 'a'.zfill(10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**9) }}",
    "a width": "{{ '{:10000000000}'.format(1) }}",
    "a width of %": "{{ '%010000000000d' % 1 }}",
    "a width by a filter": "{{ '%01000000000d' | format(1) }}",
    "a power": "{{ 7 ** (7 ** (7 ** 7)) }}",
    "a power in a variable": "{% set n = 10 ** 9 %}{{ (3 ** n) % 2 }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "replacing": "{% set a = 'a' * 10**6 %}{{ a.replace('a', a) }}",
    "joining": "{% set a = 'a' * 10**6 %}{{ a.join(a) }}",
    "doubling": "{% set n = namespace(t='a') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "a batch": "{{ [1] | batch(10**10, 0) | list }}",
    "slices": "{{ [1] | slice(10**9) | list }}",
    "rounding": "{{ 1.5 | round(10**9, 'floor') }}",
    "filler": "{{ lipsum(n=10**8) }}",
    "lists of lists": DOUBLED + "{{ a }}",
    "lists that are compared": DOUBLED
    + DOUBLED.replace("set a = [a, a]", "set b = [b, b]").replace("set a", "set b")
    + "{{ a == b }}",
    "a long text": "{% for a in range(10000) %}{{ 'a' * 10000 }}{% endfor %}",
    "macros": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{% for a in range(9999) %}{{ a }}{% endfor %}"
    "{% macro g(n) %}{% if n %}{{ g(n - 1) }}{{ g(n - 1) }}{% endif %}{% endmacro %}{{ g(40) }}",
}


def resident() -> int:
    """MiB of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_template_ends_with_one_sentence(name: str) -> None:
    begin, before = time.process_time(), resident()
    with pytest.raises(RequestError, match=r"the chat template .*this conversation") as told:
        render({"default": COSTLY[name]}, SAID, {})
    assert time.process_time() - begin < 5
    assert resident() - before < 200
    assert "\n" not in str(told.value)
    assert render({"default": "{{ messages[0].content }}"}, SAID, {}) == "hello"


INVALID = {
    "ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "operators": "{{ 1" + " + 1" * 20_000 + " }}",
    "loops": "{% for a in [1] %}" * 50 + "{% endfor %}" * 50,
    "not closed": "{% if 1 %}",
}


@pytest.mark.parametrize("name", INVALID)
def test_a_template_that_cannot_be_compiled_is_an_error_of_the_checkpoint(name: str) -> None:
    with pytest.raises(CheckpointError, match="the chat template is not valid") as told:
        render({"default": INVALID[name]}, SAID, {})
    assert "\n" not in str(told.value)
    with pytest.raises(CheckpointError, match="the chat template is not valid"):
        read_template(INVALID[name])


ESCAPES = [
    "{{ ''.__class__ }}", "{{ ''['__class__'] }}", "{{ '' | attr('__class__') }}", "{{ '' | attr('_' ~ '_class__') }}",
    "{{ ().__class__.__base__.__subclasses__() }}", "{{ [].__class__.__mro__ }}", "{{ {}.__class__.mro() }}",
    "{{ messages.__class__ }}", "{{ messages[0].__class__.__init__.__globals__ }}", "{{ self.__class__ }}",
    "{{ self._TemplateReference__context }}", "{{ self.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}", "{{ lipsum['__globals__'] }}", "{{ lipsum.__globals__.os.popen('id').read() }}",
    "{{ cycler.__init__.__globals__ }}", "{{ joiner.__init__.__globals__ }}", "{{ namespace.__init__.__globals__ }}",
    "{{ range.__class__ }}", "{{ dict.__base__ }}", "{{ dict.mro() }}", "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__ }}", "{{ raise_exception.__closure__ }}", "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__builtins__ }}", "{{ '{0.__class__}'.format(1) }}", "{{ '{0[__class__]}'.format(raise_exception) }}",
    "{{ '{a.__class__.__init__.__globals__}'.format(a=cycler) }}", "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ ('{0.__cl' ~ 'ass__}') | attr('format')(1) }}", "{{ ['{0.__class__}'] | map('format', 1) | first }}{{ 1.a.b }}",
    "{{ ['{.__class__.__mro__}'.format] | map('attr', '__self__') | first }}{{ ''.__class__ }}",
    "{{ [''] | map(attribute='__class__') | list }}", "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [lipsum] | map(attribute='__globals__.os') | list }}", "{{ [''] | groupby('__class__') | list }}",
    "{{ [cycler] | sort(attribute='__init__.__globals__') }}", "{{ [cycler] | selectattr('__init__.__globals__') | list }}",
    "{{ [cycler] | sum(attribute='__init__.__globals__', start=1) }}", "{{ loop.__class__ }}",
    "{% for a in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}", "{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}",
    "{% include '/etc/passwd' %}", "{% import '/etc/passwd' as p %}", "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}", "{{ messages.clear() }}",
    "{{ (messages | map('upper')).gi_frame }}", "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "{{ __import__('os') }}", "{{ open('/etc/passwd') }}", "{{ eval('1') }}",
    "{{ request.application.__globals__ }}", "{{ config.items() }}", "{{ get_flashed_messages.__globals__ }}",
]  # fmt: skip


@pytest.mark.parametrize("template", ESCAPES)
def test_nothing_beyond_the_conversation_is_reached(template: str) -> None:
    told: Any = None
    try:
        told = render({"default": template}, SAID, {})
    except RequestError as error:
        assert "\n" not in str(error)  # noqa: PT017
    assert told in (None, "", "[Undefined]", "[]", "[, ]", "[(Undefined, [''])]"), told
    assert SAID == [{"role": "user", "content": "hello"}]


def test_the_process_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMETOKEN_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert not {"SAMETOKEN_API_KEY", "HF_TOKEN"} & limited.environment().keys()


def test_a_process_that_ended_is_replaced() -> None:
    assert render({"default": "{{ messages[0].content }}"}, SAID, {}) == "hello"
    for process in templating.WORK._idle:
        process._child.kill()
        process._child.wait()
    assert render({"default": "{{ messages[0].content }}"}, SAID, {}) == "hello"


def test_a_process_that_grew_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    work = limited.Limited(templating.__name__, templating.LIMITS)
    monkeypatch.setattr(templating, "WORK", work)
    render({"default": "x"}, SAID, {})
    (kept,) = work._idle
    monkeypatch.setattr(limited, "KEPT_SIZE", kept.size() + 2**23)
    render({"default": "{{ 'a' * 2**23 }}" * 2}, SAID, {})
    assert work._idle == []
    assert not kept.is_alive()


def test_values_of_other_types_are_rendered() -> None:
    class Name(str):
        pass

    text = render({"default": "{{ a }}{{ b }}{{ messages[0].content }}"}, SAID, {"a": Name("x"), "b": (1, {"c": 2})})
    assert text == "x[1, {'c': 2}]hello"
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="nests too deeply"):
        render({"default": "{{ a }}"}, SAID, {"a": deep})

"""The events of a stream: equal however its bytes are cut, and cut at nothing but line ends."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sametoken.client.events import EventParser

STREAM = (
    'data: {"a": "x\u2028y\x85z"}\r\n\r\n: a comment\r\ndata:two\ndata: lines\n\nevent: ping\n\ndata: last\r\r'.encode()
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    found = [data for a, b in pairwise(places) for data in parser.feed(STREAM[a:b])]
    assert [*found, *parser.close()] == ['{"a": "x\u2028y\x85z"}', "two\nlines", "last"]


def test_a_byte_order_mark_and_a_missing_last_line_end() -> None:
    parser = EventParser()
    assert parser.feed(b"\xef\xbb\xbfdata: a\n\ndata: b\n\ndata: c") == ["a", "b"]
    assert parser.close() == ["c"]
    assert EventParser().close() == []

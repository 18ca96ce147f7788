"""Warnings about drafts that do not help: what is said, and how often."""

from __future__ import annotations

from sametoken.engine.advice import FEW, UNUSED, WINDOW, Advice, Pauses


def test_a_hopeless_draft_is_named_once() -> None:
    advice, block = Advice(), Advice()
    said = [text for _ in range(10 * FEW) for text in advice.saw_draft("draft_target", False)]
    assert len(said) == 1
    assert f"draft_target: 0 of its first {FEW} guesses" in said[0]
    assert "check what it was trained for" in said[0]
    (inside,) = [text for _ in range(FEW) for text in block.saw_draft("mtp", False)]
    assert "use the original, or another method" in inside
    lucky = Advice()
    assert not [text for i in range(1000) for text in lucky.saw_draft("draft_target", i % 5 == 0)]
    rare = Advice()
    assert len([text for i in range(1000) for text in rare.saw_draft("draft_target", i == 3)]) == 1


def test_an_unused_draft_is_named_once() -> None:
    advice = Advice()
    said = [text for _ in range(2 * UNUSED) for text in advice.saw_end(("ngram",), ["draft_target"])]
    assert len(said) == 1
    assert "draft_target" in said[0]
    used = Advice()
    used.saw_end(("draft_target",), ["draft_target"])
    assert not [text for _ in range(UNUSED) for text in used.saw_end((), ["draft_target"])]
    assert not [text for _ in range(2 * UNUSED) for text in Advice().saw_end(("ngram",), [])]


def test_changes_between_drafting_and_not_are_noticed_and_told_ever_more_rarely() -> None:
    pauses = Pauses()

    def window(left_out: bool) -> tuple[int, bool]:
        """Forwards whose drafts are left out or not, but for a trial in ten; what was told, and the state."""
        return sum(pauses.saw_forward(left_out and i % 10 > 0) for i in range(WINDOW)), pauses.paused

    assert window(False) == (0, False)
    assert window(True) == (1, True)
    assert window(True) == (0, True)
    assert window(False) == (1, False)
    told = [window(left_out)[0] for left_out in (True, False) * 15]
    assert [i + 3 for i, count in enumerate(told) if count] == [4, 8, 16, 32]

"""Stop strings: the same match as a search over the whole text, however it is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.frontend.text.stop_strings import StopStrings

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3, unique=True)


def naive(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The stop string that is complete first, the longest of several, and where it begins."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return stop, end - len(stop)
    return None


def in_pieces(text: str, borders: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[start:end] for start, end in itertools.pairwise(marks)]


@given(text=LETTERS, stops=STOPS, borders=st.lists(st.integers(0, 24)), include=st.booleans())
def test_pieces_find_what_a_search_of_the_whole_finds(
    text: str, stops: list[str], borders: list[int], include: bool
) -> None:
    watcher = StopStrings(stops, include=include)
    shown = []
    for piece in in_pieces(text, borders):
        watcher.push(piece)
        shown.append(watcher.take())
        if watcher.matched is not None:
            break
    shown.append(watcher.take(final=True))
    found = naive(text, stops)
    if found is None:
        assert watcher.matched is None
        expected = text
    else:
        stop, start = found
        assert watcher.matched == stop
        expected = text[: start + len(stop)] if include else text[:start]
    assert watcher.text == expected
    assert "".join(shown) == expected, "what was shown was never taken back"


@given(text=LETTERS, stops=STOPS, borders=st.lists(st.integers(0, 24)))
def test_no_more_is_held_back_than_could_begin_a_stop_string(
    text: str, stops: list[str], borders: list[int]
) -> None:
    watcher = StopStrings(stops)
    shown = ""
    for piece in in_pieces(text, borders):
        watcher.push(piece)
        if watcher.matched is not None:
            return
        shown += watcher.take()
        held = watcher.text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@given(text=LETTERS, stops=STOPS, silent=st.integers(0, 24))
def test_a_match_must_end_after_the_unarmed_text(text: str, stops: list[str], silent: int) -> None:
    watcher = StopStrings(stops, include=True)
    for position, character in enumerate(text):
        watcher.push(character, armed=position >= silent)
        if watcher.matched is not None:
            break
    ends = [
        end
        for end in range(min(silent, len(text)) + 1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops)
    ]
    assert watcher.text == (text[: ends[0]] if ends else text)
    assert (watcher.matched is not None) == bool(ends)


def test_without_stop_strings_nothing_is_held_back() -> None:
    watcher = StopStrings(())
    watcher.push("anything")
    assert watcher.take() == "anything"
    assert watcher.take(final=True) == ""


def test_nothing_can_follow_a_match() -> None:
    watcher = StopStrings(["end"])
    watcher.push("the end")
    assert watcher.matched == "end"
    with pytest.raises(RuntimeError, match="'end'"):
        watcher.push("more")

"""The index of suffixes finds what a search of all texts finds, and forgets what it must."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Hashable, Iterator

import pytest

from coppice.radix import compiled
from coppice.radix.mirror.suffixes.hashes import LONG, LONG_AWAY, LONG_FACTOR, MASK
from coppice.radix.mirror.suffixes.index import CONTEXT, Line, Place, SuffixIndex
from coppice.radix.mirror.suffixes.text import BLOCK, Space

ALL = 10**9  # places that may be visited


def tokens(*values: int) -> array[int]:
    return array("i", values)


def packed(*values: int) -> bytes:
    return tokens(*values).tobytes()


class Texts:
    """Texts of all namespaces as they are, searched token by token."""

    def __init__(self, kept: int) -> None:
        self.index = SuffixIndex(kept, seed=5)
        self.lines: list[tuple[Hashable, Line, array[int]]] = []
        self.ended: list[tuple[Hashable, array[int]]] = []

    def begin(self, namespace: Hashable) -> None:
        self.lines.append((namespace, self.index.begin(namespace), array("i")))

    def enter(self, number: int, new: list[int]) -> None:
        _, line, text = self.lines[number]
        text.extend(new)
        self.index.enter(line, text)
        assert line.length == len(text)

    def end(self, number: int) -> None:
        namespace, line, text = self.lines.pop(number)
        self.index.end(line)
        self.ended.append((namespace, text))

    def forget(self, namespace: Hashable) -> None:
        """Its lines go on elsewhere: their next tokens begin a text."""
        self.index.forget(namespace)
        self.ended = [each for each in self.ended if each[0] != namespace]
        for number in range(len(self.lines) - 1, -1, -1):
            if self.lines[number][0] == namespace:
                self.end(number)
        self.ended = [each for each in self.ended if each[0] != namespace]

    def found(self, number: int, most: int, visits: int = ALL) -> list[Place]:
        _, line, text = self.lines[number]
        return self.index.find(line, text, most, visits)

    def searched(self, number: int, most: int) -> Counter[tuple[int, bytes]]:
        """The places of the same tokens in all texts of the namespace."""
        namespace, _, own = self.lines[number]
        places: Counter[tuple[int, bytes]] = Counter()
        for text in [
            *(text for name, text in self.ended if name == namespace),
            *(text for name, _, text in self.lines if name == namespace),
        ]:
            for at in range(1, len(text)):
                if text[at] != own[-1] or len(own) < 2 or text[at - 1] != own[-2]:
                    continue
                if text is own and at == len(own) - 1:
                    continue
                length = 0
                while (
                    length < min(CONTEXT, at + 1, len(own))
                    and text[at - length] == own[-1 - length]
                ):
                    length += 1
                following = text[at + 1 : at + 1 + most]
                if 0 < len(following) < most and following == own[-len(following) :]:
                    following = (following * most)[:most]
                if following:
                    places[length, following.tobytes()] += 1
        return places


def test_places_come_by_what_is_equal_and_then_the_latest_first() -> None:
    index = SuffixIndex(1000)
    for text in ((1, 2, 3, 4), (9, 2, 3, 5), (1, 2, 3, 6)):
        line = index.begin("a")
        index.enter(line, tokens(*text))
        index.end(line)
    line = index.begin("a")
    index.enter(line, (own := tokens(1, 2, 3)))
    found = index.find(line, own, 4)
    assert found == [(3, packed(6)), (3, packed(4)), (2, packed(5))]
    assert index.find(line, own, 4, visits=1) == [(3, packed(6))]


def test_a_line_finds_its_own_tokens_and_repeats_what_it_repeats() -> None:
    index = SuffixIndex(1000)
    line = index.begin(None)
    index.enter(line, (own := tokens(7, 1, 2, 1, 2)))
    assert index.find(line, own, 5) == [(2, packed(1, 2, 1, 2, 1))]
    own.append(3)
    index.enter(line, own)
    assert index.find(line, own, 5) == []


def test_a_long_match_is_found_among_many_short_ones() -> None:
    """The chain of the last two tokens has more places than are visited."""
    index, rng = SuffixIndex(100_000), random.Random(0)
    wanted = tokens(50, 51, 52, 53, 54, 8, 9, 77)
    line = index.begin(None)
    index.enter(line, wanted)
    for _ in range(200):
        index.enter(index.begin(None), tokens(rng.randrange(20, 40), 8, 9, 66))
    index.enter(line := index.begin(None), (own := wanted[:-1]))
    assert index.find(line, own, 1, visits=2)[0] == (7, packed(77))


def test_namespaces_find_nothing_of_each_other() -> None:
    index = SuffixIndex(10_000)
    index.enter(index.begin("a"), (text := array("i", range(600))))
    line = index.begin("b")
    index.enter(line, text[:500])
    assert index.find(line, text[:500], 8) == []
    line = index.begin("a")
    index.enter(line, text[:500])
    assert index.find(line, text[:500], 8)[0] == (CONTEXT, text[500:508].tobytes())


def test_a_known_prompt_is_not_entered_again_but_goes_on() -> None:
    index = SuffixIndex(10_000)
    prompt = array("i", range(2000))
    index.enter(index.begin(None), prompt)
    before = len(index)
    second = prompt + tokens(5, 6, 7, 8)
    line = index.begin(None)
    index.enter(line, second)
    assert len(index) - before < 300
    third = index.begin(None)
    index.enter(third, second[:-1])
    assert index.find(third, second[:-1], 3)[0] == (CONTEXT, packed(8))


def test_old_text_is_forgotten_and_with_it_its_namespace() -> None:
    index = SuffixIndex(4 * BLOCK)
    line = index.begin("a")
    index.enter(line, tokens(1, 2, 3))
    index.end(line)
    assert set(index.text.named) == {"a"}
    other = index.begin("b")
    text = array("i", range(1000, 1000 + 6 * BLOCK))
    for end in range(10, len(text), 10):
        index.enter(other, text[:end])
    assert set(index.text.named) == {"b"}
    line = index.begin("a")
    index.enter(line, (own := tokens(1, 2)))
    assert index.find(line, own, 1) == []
    assert len(index) <= 4 * BLOCK


def test_forgetting_leaves_other_namespaces_and_lines_go_on() -> None:
    texts = Texts(10_000)
    for name in ("a", "b", "a", "b"):
        texts.begin(name)
        texts.enter(len(texts.lines) - 1, [1, 2, 3, 4])
    index = texts.index
    index.forget("a")
    for number, expected in ((0, 0), (1, 2)):
        _, line, own = texts.lines[number]
        own.extend([1, 2])
        index.enter(line, own)
        assert len(index.find(line, own, 1)) == expected
    _, line, own = texts.lines[0]
    own.extend([9, 1, 2])
    index.enter(line, own)
    assert [place.following for place in index.find(line, own, 1)] == [packed(9)]
    index.clear()
    assert len(index) == 0
    assert index.find(line, own, 1) == []


@pytest.mark.parametrize("names", [None, "bc"])
def test_forgetting_several_namespaces_leaves_their_lines_to_go_on(names: str | None) -> None:
    index = SuffixIndex(10_000)
    lines: dict[str, tuple[Line, array[int]]] = {}
    for name in "abcd":  # a line of each has ended, and another goes on
        ended = index.begin(name)
        index.enter(ended, tokens(1, 2, 3))
        index.end(ended)
        lines[name] = index.begin(name), tokens(4, 1, 2)
        index.enter(*lines[name])
    ended = index.begin("gone")
    index.enter(ended, tokens(1, 2, 3))
    index.end(ended)
    if names is None:
        index.clear()
        assert len(index) == 0
        assert set(index.text.named) == {*"abcd"}
    else:
        index.forget_all([*names, "unknown", "gone"])
        assert set(index.text.named) == {*"abcd"}
    for name, (line, own) in lines.items():
        forgotten = names is None or name in names
        assert index.find(line, own, 1) == ([] if forgotten else [(2, packed(3))])
        own.extend([7, 8, 9, 7, 8])
        index.enter(line, own)
        assert index.find(line, own, 1)[0] == (2, packed(9))
        index.end(line)
    index.clear()
    assert not index.text.named


@pytest.mark.skipif(compiled.in_use("coppice.radix"), reason="compiled code reads lists itself")
def test_all_namespaces_are_forgotten_in_one_pass() -> None:
    class Counted(list[Space | None]):
        visits = 0

        def __iter__(self) -> Iterator[Space | None]:
            for each in super().__iter__():
                self.visits += 1
                yield each

    index = SuffixIndex(100 * BLOCK)
    for name in range(30):
        line = index.begin(name)
        index.enter(line, tokens(1, 2, 3))
    index.text.spaces = counted = Counted(index.text.spaces)
    index.clear()
    assert counted.visits == index.text.blocks == 100
    index.forget_all(["unknown"])
    assert counted.visits == 100


def test_it_takes_at_most_16_bytes_a_token() -> None:
    for kept in (BLOCK, 1000, 100_000, 2**20, 2**20 - BLOCK, 3 * 2**19):
        index = SuffixIndex(kept)
        held = [index.text.tokens, index.text.older, index._heads, index._longs]
        assert (
            sum(len(each) * each.itemsize for each in held) <= index.nbytes <= 16 * (kept + BLOCK)
        )
    with pytest.raises(ValueError, match="tokens must be at least 64, got 3"):
        SuffixIndex(3)


def test_the_factor_of_the_token_that_leaves_cancels_its_own() -> None:
    assert (LONG_AWAY + pow(LONG_FACTOR, LONG, MASK + 1)) & MASK == 0


def test_one_by_one_and_many_at_once_are_the_same() -> None:
    rng = random.Random(3)
    one, many = SuffixIndex(50_000), SuffixIndex(50_000)
    for _ in range(20):
        text = array("i", (rng.randrange(5) for _ in range(rng.randrange(30, 250))))
        first, second = one.begin(None), many.begin(None)
        for end in range(1, len(text) + 1):
            one.enter(first, text[:end])
        cut = rng.randrange(len(text))
        many.enter(second, text[:cut])
        many.enter(second, text)
        assert first.hash == second.hash
    assert one.text.tokens == many.text.tokens
    assert one.text.older == many.text.older
    assert one._heads == many._heads
    assert one._longs == many._longs


def fuzz(operations: int, seed: int) -> None:
    """Random texts of three namespaces, all places beside a search of all texts."""
    rng = random.Random(seed)
    done = 0
    while done < operations:
        texts = Texts(200_000)
        letters = rng.choice([2, 4, 30])
        compared = 0
        while compared < 3000 and done < operations:
            done += 1
            roll = rng.random()
            if not texts.lines or roll < 0.03:
                texts.begin(rng.randrange(3))
                continue
            number = rng.randrange(len(texts.lines))
            if roll < 0.05:
                texts.end(number)
            elif roll < 0.052:
                texts.forget(rng.randrange(3))
            elif roll < 0.06:
                texts.enter(number, [rng.randrange(letters) for _ in range(rng.randrange(90))])
            elif roll < 0.9 and len(texts.lines[number][2]) < 200:
                texts.enter(number, [rng.randrange(letters) for _ in range(rng.choice((1, 1, 3)))])
            elif texts.lines[number][2]:
                most = rng.choice((1, 4, 20))
                found = Counter(texts.found(number, most))
                assert found == texts.searched(number, most)
                compared += 1
                if sum(len(text) for _, text in texts.ended) > 800:
                    texts.forget(rng.randrange(3))


def fuzz_small(operations: int, seed: int) -> None:
    """The same where texts push each other out: whatever is found is there, in the namespace."""
    rng = random.Random(seed)
    texts = Texts(rng.choice((1, 3, 8, 20)) * BLOCK)
    for done in range(operations):
        if done % 5000 == 0:
            texts = Texts(rng.choice((1, 3, 8, 20)) * BLOCK)
            letters = rng.choice([2, 5, 40])
        roll = rng.random()
        if not texts.lines or (roll < 0.05 and len(texts.lines) < 12):
            texts.begin(rng.randrange(3))
            continue
        number = rng.randrange(len(texts.lines))
        own = texts.lines[number][2]
        if roll < 0.08 or len(own) > 400:
            texts.end(number)
            del texts.ended[:-40]
        elif roll < 0.1:
            copied = rng.choice(texts.lines)[2]
            texts.enter(number, [*copied[: rng.randrange(300)], 1])
        elif roll < 0.8:
            texts.enter(number, [rng.randrange(letters) for _ in range(rng.choice((1, 2, 3, 40)))])
        elif own:
            namespace = texts.lines[number][0]
            everything = [text for name, text in texts.ended if name == namespace]
            everything += [text for name, _, text in texts.lines if name == namespace]
            for length, following in texts.found(number, 4, visits=8):
                context, next_ones = own[-length:].tobytes(), following[:4]
                assert any(_has(text, context + next_ones) for text in everything)


def _has(text: array[int], piece: bytes) -> bool:
    whole = text.tobytes()
    at = whole.find(piece)
    while at >= 0 and at % 4:
        at = whole.find(piece, at + 1)
    return at >= 0


def test_fuzz_beside_a_search() -> None:
    fuzz(4000, seed=1)


def test_fuzz_of_an_index_that_is_too_small() -> None:
    fuzz_small(6000, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_operations() -> None:
    for seed in range(10):
        fuzz(60_000, seed)
        fuzz_small(40_000, seed)

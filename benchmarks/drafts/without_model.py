"""Accepted tokens a step of given texts, where only drafting runs and a step has a fixed width."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from coppice.radix.mirror.suffixes.branches import Grown, grow
from coppice.radix.mirror.suffixes.index import SuffixIndex
from drafts.encoded import Text

DEEPEST = 48


def _chances(grown: Seq[Grown]) -> list[float]:
    chances: list[float] = []
    for each in grown:
        alone = min(0.98, 0.5 + 0.08 * each.length) * each.share
        chances.append(alone * (chances[each.parent] if each.parent >= 0 else 1.0))
    return chances


@dataclass(frozen=True, slots=True)
class Indexed:
    """What drafting with the index of suffixes gave and took.

    Attributes:
        tokens_a_step: accepted ones, and one more.
        enter_seconds: for each token that was entered, the mean.
        draft_seconds: for each draft that was looked up, the mean.
    """

    tokens_a_step: float
    enter_seconds: float
    draft_seconds: float


def index_tokens_a_step(texts: Seq[Text], width: int) -> Indexed:
    """With the index of suffixes: the `width` likeliest tokens of what followed. One after another,
    so later texts find those before."""
    index, steps, tokens, entered = SuffixIndex(1 << 19), 0, 0, 0
    entering = drafting = 0.0
    for text in texts:
        answer = text.answer
        line, own = index.begin(None), text.prompt[:]
        own.append(answer[0])
        at = 1
        while at < len(answer):
            begun = time.perf_counter()
            index.enter(line, own)
            known = time.perf_counter()
            grown = grow(index.find(line, own, min(width, DEEPEST)), 4 * width)
            drafting += time.perf_counter() - known
            entering += known - begun
            chances = _chances(grown)
            taken = set(sorted(range(len(grown)), key=lambda i: (-chances[i], i))[:width])
            after: defaultdict[int, dict[int, int]] = defaultdict(dict)
            for number in sorted(taken):
                after[grown[number].parent].setdefault(grown[number].token, number)
            last, count = -1, 0
            while at + count < len(answer):
                found = after[last].get(answer[at + count])
                if found is None:
                    break
                last, count = found, count + 1
            new = answer[at : at + count + 1]
            own.extend(new)
            at += len(new)
            steps, tokens = steps + 1, tokens + len(new)
        index.end(line)
        entered += len(own)
    return Indexed(tokens / steps, entering / entered, drafting / steps)


def lookup_tokens_a_step(texts: Seq[Text], width: int, longest: int = 3) -> float:
    """With the first place of the request's last tokens in itself, as prompt lookup has it."""
    steps = tokens = 0
    for text in texts:
        answer = text.answer
        own = [*text.prompt, answer[0]]
        first: dict[tuple[int, ...], int] = {}
        entered, at = 0, 1
        while at < len(answer):
            while entered < len(own) - 1:  # n-grams that something follows
                for size in range(1, longest + 1):
                    if entered + 1 >= size:
                        first.setdefault(tuple(own[entered + 1 - size : entered + 1]), entered + 1)
                entered += 1
            draft: list[int] = []
            for size in range(longest, 0, -1):
                place = first.get(tuple(own[-size:]))
                if place is not None:
                    draft = own[place : place + width]
                    break
            count = 0
            while (
                count < len(draft)
                and at + count < len(answer)
                and draft[count] == answer[at + count]
            ):
                count += 1
            new = answer[at : at + count + 1]
            own.extend(new)
            at += len(new)
            steps, tokens = steps + 1, tokens + len(new)
    return tokens / steps

"""The workloads of `cpu_peers.py`: which requests are submitted together, and what follows.

Needs only the standard library, so that the interpreter of any engine can import it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# The range of drawn ids: above special and byte tokens, below the vocabulary of both models.
_FIRST, _LAST = 300, 31_999


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt of token ids, continued by `out` tokens.

    The continuation is greedy, or `n` > 1 random samples at temperature 1, or a beam search of
    width `beams` > 0. The end of sequence is ignored.
    """

    prompt: list[int]
    out: int
    n: int = 1
    beams: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` prompts of `shared` + `own` tokens, `out` tokens each, all submitted at once.

    With `turns` > 1 they are conversations: when all are answered, each continues with its answer
    and `own` new tokens. (So engines that answer alike get the same tokens in later turns, and the
    others get as many.) Samples are drawn at temperature 1, since greedy ones would be equal, which
    some engines refuse.
    """

    name: str
    requests: int
    shared: int
    own: int
    out: int
    n: int = 1
    beams: int = 0
    turns: int = 1

    @property
    def lines(self) -> int:
        """Sequences that each request extends at the same time."""
        return max(self.n, self.beams, 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence at its end."""
        return self.shared + self.turns * (self.own + self.out)

    @property
    def tokens_shared(self) -> int:
        """Tokens of KV at the end of the workload, each shared prefix counted once."""
        grows = self.turns * self.out * self.lines
        return self.shared + self.requests * (self.turns * self.own + grows)

    @property
    def tokens_separate(self) -> int:
        """The same if every sequence holds all of its tokens separately."""
        return self.requests * self.lines * self.longest

    def first(self, rng: random.Random) -> list[Job]:
        """The jobs of the first turn."""
        prefix = _draw(rng, self.shared)
        return [self._job(prefix + _draw(rng, self.own)) for _ in range(self.requests)]

    def following(
        self, rng: random.Random, jobs: Sequence[Job], answers: Sequence[Sequence[int]]
    ) -> list[Job]:
        """The jobs of the next turn, after `answers[i]` to `jobs[i]`."""
        return [
            self._job([*job.prompt, *answer, *_draw(rng, self.own)])
            for job, answer in zip(jobs, answers, strict=True)
        ]

    def _job(self, prompt: list[int]) -> Job:
        return Job(prompt, self.out, self.n, self.beams)


def _draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(_FIRST, _LAST) for _ in range(count)]


def workloads(quick: bool) -> dict[str, Workload]:
    """W1 to W6 by name; with `quick` an eighth as long."""
    full = [
        Workload("W1", requests=32, shared=1024, own=64, out=32),
        Workload("W2", requests=32, shared=0, own=1088, out=32),
        Workload("W3", requests=8, shared=512, own=64, out=32, turns=4),
        Workload("W4", requests=1, shared=0, own=1024, out=64, n=16),
        Workload("W5", requests=1, shared=0, own=512, out=32, beams=4),
        Workload("W6", requests=1, shared=0, own=128, out=128),
    ]
    if quick:
        full = [
            Workload(
                each.name,
                requests=-(-each.requests // 8),
                shared=each.shared // 8,
                own=each.own // 8,
                out=each.out // 8,
                n=-(-each.n // 4),
                beams=each.beams,
                turns=each.turns,
            )
            for each in full
        ]
    return {each.name: each for each in full}

"""Requests that come to a cluster: a trace of conversations, and made-up mixes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TOKEN_BYTES = 4
_BLOCK = 512  # tokens of a hash id of the trace


@dataclass(frozen=True, slots=True)
class Work:
    """A request: when it comes, its prompt in parts, and the tokens that it generates.

    Requests share the parts that are equal, so hundreds of thousands of them fit into memory.
    """

    at: float
    parts: tuple[bytes, ...]
    generated: int
    session: int

    @property
    def prompt(self) -> bytes:
        """All parts as int32 bytes."""
        return b"".join(self.parts)


def text(stream: int, count: int) -> bytes:
    """`count` tokens that belong to a number."""
    return np.random.default_rng(stream).integers(0, 2**31, count, np.int32).tobytes()


def hot_document(count: int, rate: float, rng: random.Random) -> Iterator[Work]:
    """Half of all ask about one document of 8,000 tokens, the others about one of 200."""
    documents = [text(n, 8000 if n == 0 else 3000) for n in range(201)]
    for number, at in _arrivals(count, rate, rng):
        chosen = 0 if rng.random() < 0.5 else rng.randrange(1, 201)
        prompt = documents[chosen], text(1000 + number, rng.randrange(30, 300))
        yield Work(at, prompt, rng.randrange(20, 200), number)


def tenants(count: int, rate: float, rng: random.Random) -> Iterator[Work]:
    """300 tenants, each with a system prompt of its own; a few send most (Zipf)."""
    prompts = [text(5000 + n, rng.randrange(500, 4000)) for n in range(300)]
    weights = [1 / (n + 1) for n in range(300)]
    for number, at in _arrivals(count, rate, rng):
        (tenant,) = rng.choices(range(300), weights)
        own = text(10_000 + number, rng.randrange(50, 1500))
        yield Work(at, (prompts[tenant], own), rng.randrange(20, 300), tenant)


def agents(count: int, rate: float, rng: random.Random) -> Iterator[Work]:
    """Agents with the same instructions; each step goes on from one of the agent's last four."""
    instructions = text(7, 3000)
    histories = [[(instructions, text(20_000 + n, 500))] for n in range(400)]
    for number, at in _arrivals(count, rate, rng):
        agent = rng.randrange(400)
        before = rng.choice(histories[agent][-4:])
        prompt = *before, text(100_000 + number, rng.randrange(100, 800))
        histories[agent].append(prompt)
        if sum(map(len, prompt)) > 24_000 * TOKEN_BYTES:
            histories[agent] = histories[agent][:1]
        yield Work(at, prompt, rng.randrange(30, 200), agent)


def trace(file: Path, count: int, rate: float, rng: random.Random) -> Iterator[Work]:
    """Mooncake's conversation trace (FAST'25), at this rate; a hash id stands for 512 tokens."""
    blocks: dict[int, bytes] = {}
    arrivals = _arrivals(count, rate, rng)
    with file.open(encoding="utf-8") as lines:
        for (number, at), line in zip(arrivals, lines, strict=False):
            row = json.loads(line)
            for each in row["hash_ids"]:
                if each not in blocks:
                    blocks[each] = text(10**6 + each, _BLOCK)
            prompt = [blocks[each] for each in row["hash_ids"]]
            over = sum(map(len, prompt)) - row["input_length"] * TOKEN_BYTES
            if over > 0:
                prompt[-1] = prompt[-1][:-over]
            yield Work(at, tuple(prompt), max(1, row["output_length"]), number)


def _arrivals(count: int, rate: float, rng: random.Random) -> Iterator[tuple[int, float]]:
    """Numbers and times of a Poisson process."""
    at = 0.0
    for number in range(count):
        at += rng.expovariate(rate)
        yield number, at


MIXES = {"hot document": hot_document, "tenants": tenants, "agents": agents}

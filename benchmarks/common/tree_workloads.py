"""The workloads A to F of the prefix cache, which the docstring of `tree.py` describes.

Needs only numpy, so that another engine's interpreter can import it, too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRACE_BLOCK = 512
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Work:
    """A request: its prompt and the tokens it generates, as int32 bytes."""

    prompt: bytes
    output: bytes = b""


def tokens(stream: int, count: int) -> bytes:
    """`count` deterministic tokens of stream number `stream`."""
    return np.random.default_rng(stream).integers(0, 2**31, count, np.int32).tobytes()


def workload_a(quick: bool) -> Iterator[Work]:
    shared = tokens(0, 2048)
    for request in range(500 if quick else 5000):
        yield Work(shared + tokens(1 + request, 256))


def workload_b(quick: bool) -> Iterator[Work]:
    """Turns come in random order over the conversations."""
    conversations = 20 if quick else 200
    turns = [conversation for conversation in range(conversations) for _ in range(10)]
    random.Random(0).shuffle(turns)
    texts = [b""] * conversations
    for number, conversation in enumerate(turns):
        texts[conversation] += tokens(number, 300)
        yield Work(texts[conversation])


def workload_c(quick: bool) -> Iterator[Work]:
    rng = random.Random(0)
    for _ in range(500 if quick else 5000):
        node, path = 0, b""
        for _ in range(rng.randint(1, 6)):
            node = 4 * node + 1 + rng.randrange(4)
            path += tokens(node, 128)
        yield Work(path)


def workload_d(quick: bool) -> Iterator[Work]:
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 501)
    requests = 500 if quick else 5000
    documents = rng.choice(500, requests, p=weights / weights.sum())
    for number, document in enumerate(documents):
        yield Work(tokens(int(document), 2000) + tokens(1000 + number, 50))


def workload_e(quick: bool) -> Iterator[Work]:
    documents = 5 if quick else 50
    questions = [document for document in range(documents) for _ in range(20)]
    random.Random(0).shuffle(questions)
    for number, document in enumerate(questions):
        yield Work(tokens(document, 100_000) + tokens(1000 + number, 100))


def work_of(blocks: Sequence[int], prompt: int, output: int, fresh: int) -> Work:
    """A request of a trace: its last block is cut to `prompt` tokens.

    Its output are tokens that never repeat, if `fresh` counts those of the requests before.
    """
    ids = np.array(blocks, np.uint64)[:, None] * np.uint64(TRACE_BLOCK)
    inside = np.arange(TRACE_BLOCK, dtype=np.uint64)
    generated = np.arange(fresh, fresh + output, dtype=np.uint64)
    return Work(_mixed((ids + inside).reshape(-1)[:prompt]), _mixed(generated + np.uint64(2**40)))


def workload_f(trace: Path, quick: bool) -> Iterator[Work]:
    fresh = 0
    with trace.open() as lines:
        for number, line in enumerate(lines):
            if quick and number == 1000:
                return
            request = json.loads(line)
            yield work_of(
                request["hash_ids"], request["input_length"], request["output_length"], fresh
            )
            fresh += request["output_length"]


def requests_of(workload: str, trace: Path | None, quick: bool) -> Iterator[Work]:
    """The requests of workload A, B, C, D, E or F; F needs `trace`."""
    if workload == "F":
        assert trace is not None
        return workload_f(trace, quick)
    makers: dict[str, Callable[[bool], Iterator[Work]]] = {
        "A": workload_a,
        "B": workload_b,
        "C": workload_c,
        "D": workload_d,
        "E": workload_e,
    }
    return makers[workload](quick)


def _mixed(numbers: np.ndarray) -> bytes:
    """Maps each uint64 to a token of 31 bits by multiplication with an odd constant."""
    return ((numbers * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)).astype(np.int32).tobytes()

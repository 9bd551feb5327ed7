"""What a folder with a million pages takes to open, to be asked, and to be repaired.

    python benchmarks/tiers_index.py [--pages 1000000] [--rounds N] [--quick] [--json FILE]

The pages are small, since only their number matters: prompts of 512 pages of 16 tokens, of which
some are hot. Medians over the rounds, in each of which a process of its own, that finds nothing of
the folder in its memory, does all of this:

    open      `DiskStore(folder)`, as a server does at its start
    first     finds all pages of a prompt of 8,192 tokens, which nobody has asked for
    hottest   finds the 4,096 pages that were used most and last

`times` has seconds; `of_goal` is `open` as a part of the 2 s that it may take. `rebuilt`: seconds
to make the index anew from the segments, as after it was lost; once.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from common.harness import Rows, parser, processor
from coppice.radix.mirror.names import PageKey, chain
from coppice.runtime.tiers.disk.folder import content
from coppice.runtime.tiers.disk.store import DiskStore

_GOAL_SECONDS = 2.0
_PAGE_BYTES, _TOKENS, _PROMPT = 64, 16, 8192
_CAPACITY = 2**40
_ROOT = b"a root of chains"


def keys_of(prompt: int) -> list[PageKey]:
    tokens = np.random.default_rng(prompt).integers(0, 32_000, _PROMPT, np.int32)
    return chain(_ROOT, tokens.tobytes(), 4 * _TOKENS)


def fill(folder: Path, pages: int) -> None:
    store = DiskStore(folder, _CAPACITY, _PAGE_BYTES)
    each = _PROMPT // _TOKENS
    rows = np.zeros((each, _PAGE_BYTES), np.uint8)
    for prompt in range(-(-pages // each)):
        keys = keys_of(prompt)
        store.store(keys, rows)
        if prompt % 50 == 0:
            store.used_above(keys, 1 + prompt % 7)
    store.close()


def measure(folder: Path, prompt: int) -> None:
    """What one process does; prints its seconds."""
    begun = time.perf_counter()
    store = DiskStore(folder, _CAPACITY, _PAGE_BYTES)
    opened = time.perf_counter()
    assert all(place is not None for place in store.find(keys_of(prompt)))
    found = time.perf_counter()
    assert store.hottest([_ROOT], 4096)
    hottest = time.perf_counter()
    store.close()
    seconds = {"open": opened - begun, "first": found - opened, "hottest": hottest - found}
    print(json.dumps(seconds))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--pages", type=int, default=1_000_000)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--measure", nargs=2, metavar=("DIR", "PROMPT"), help="what a process does")
    arguments = made.parse_args()
    if arguments.measure:
        measure(Path(arguments.measure[0]), int(arguments.measure[1]))
        return
    pages = 20_000 if arguments.quick else arguments.pages
    rows = Rows(arguments.json)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        fill(folder, pages)
        seconds: list[dict[str, float]] = []
        for round_ in range(arguments.rounds):
            command = [sys.executable, __file__, "--measure", place, str(3 * round_ + 1)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            seconds.append(json.loads(done.stdout))
        times = {name: statistics.median(each[name] for each in seconds) for name in seconds[0]}
        for path in content(folder).glob("index.sqlite*"):
            path.unlink()
        begun = time.perf_counter()
        DiskStore(folder, _CAPACITY, _PAGE_BYTES).close()
        times["rebuilt"] = time.perf_counter() - begun
        rows.add(
            case="index",
            pages=pages,
            of_goal=round(times["open"] / _GOAL_SECONDS, 5),
            spread=[round(each["open"] / times["open"], 2) for each in seconds],
            times={name: round(value, 5) for name, value in times.items()},
            machine=processor(),
        )


if __name__ == "__main__":
    main()

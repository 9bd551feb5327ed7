"""What loading pages from tiers takes beside computing them, and what keeping them costs.

    python benchmarks/tiers.py [--models S M demo] [--redis redis://127.0.0.1:PORT] [--quick]
                               [--rounds N] [--ranks N] [--json FILE]

Rows of `case: first token`, for prompts of 1,000, 4,000 and 8,000 random tokens, medians over the
rounds, in each of which all ways follow each other on one engine for each tier: seconds to the
first token with the prompt

    cold        computed, by an engine without tiers
    memory      in the KV cache
    disk        in the folder of `--disk-cache`, whose files the system was told to forget
    cached      in that folder, with the files in the system's memory
    shared      in a Redis server, with `--redis`
    host        in main memory
    all         in all of these at once

as `x_cold`: how many times faster than cold, and for the disk `x_read`: how many times as long as
reading the same files takes, and `x_read_but_step`: the same without the step that computes the
token, which `memory` has, too. `hit`: the share of the prompt that was not computed; an engine may
find that computing a part is faster.

Rows of `case: together`: a tier is slowed down until loading takes as long as computing (`equal`),
three times as long or a third. `alone`: seconds with loading alone, `computed` without a tier,
`both` with the beginning computed while the end is loaded; `gain` is the better of the two over
both.

Rows of `case: unused`: requests of which nothing is in the tiers, on two engines of which one has
`tiers` that get all their pages, in turns; `over` is the time with them over the time without.

Rows of `case: rounded`, with the demo model or the folder of another one that knows text: what
answers after a hit lose where the disk keeps 8 bits a number (`--disk-cache-dtype`). Windows of
prose and code (`common/public_text.py`) have their first half in the tier; the second half is
scored after it. `logprob`: mean and greatest difference of its tokens' log-probabilities to those
without a hit; `perplexity_more`: ratio of perplexities less one; `same_best`: share of places at
which the likeliest token is the same; `bytes`: of what is read, beside the KV cache's.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from common.harness import Rows, machine, parser
from common.public_text import public_text
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.tiers.loading.rates import Rate
from cpu.checkpoints import MODELS, checkpoint

LENGTHS = (1000, 4000, 8000)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


_RANKS = {"tensor_parallel_size": 1}  # of all engines


def engine(model: str, tokens: int = 8192 + 512, **options: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=model, kv_cache_tokens=tokens, max_num_batched_tokens=512, max_num_seqs=16,
            seed=0, **_RANKS, **options,
        )
    )  # fmt: skip


def first_token(made: Engine, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and the prompt tokens that were not computed."""
    begun = time.perf_counter()
    made.add_request("a", prompt, ONE)
    cached = 0
    while made.has_unfinished():
        for output in made.step():
            cached = output.cached_tokens
    return time.perf_counter() - begun, cached


def settle(made: Engine) -> None:
    """Waits until all that was hit again, and all that was given to the writer, is stored."""
    assert made.tiers is not None
    # Evicted at once, a long prompt would be more than may wait to be written.
    while made.tiers._again:
        made.tiers.between()
        time.sleep(0.01)
    while made.tiers.report().waiting_bytes:
        made.tiers.poll()
        time.sleep(0.01)


def forget(folder: Path) -> int:
    """Has the system forget the content of the files; returns their bytes."""
    size = 0
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
            size += path.stat().st_size
    return size


def read_seconds(folder: Path, size: int) -> float:
    """Seconds in which `size` bytes of the segment files are read, once they were forgotten."""
    forget(folder)
    begun, left, block = time.perf_counter(), size, bytearray(8 << 20)
    for path in sorted(folder.rglob("*.kv")):
        with path.open("rb", buffering=0) as file:
            while left > 0 and (got := file.readinto(memoryview(block)[: min(left, len(block))])):
                left -= got
    return time.perf_counter() - begun


def times_of_first_tokens(rows: Rows, name: str, model: str, options: dict[str, Any]) -> None:
    longest = options["longest"]
    for length in sorted({min(each, longest) for each in LENGTHS}):
        rng = random.Random(length)
        prompt = [rng.randrange(3, 200) for _ in range(length)]
        found: dict[str, list[float]] = {}
        hits: dict[str, list[int]] = {}
        reads: list[float] = []
        folder, other = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
        plain = engine(model)
        sides = {"disk": engine(model, disk_cache=str(folder), disk_cache_size="8GiB"),
                 "host": engine(model, host_cache="4GiB")}  # fmt: skip
        if options["redis"]:
            sides["shared"] = engine(model, shared_cache=options["redis"])
            sides["all"] = engine(model, **every_tier(other, options))
        try:
            for made in sides.values():
                for _ in range(2):
                    first_token(made, prompt)
                settle(made)
                made.tree.evict(made.num_pages)
                first_token(made, [5] * 20)
                settle(made)
            for _ in range(options["rounds"]):
                plain.reset_cache()
                found.setdefault("cold", []).append(first_token(plain, prompt)[0])
                found.setdefault("memory", []).append(first_token(plain, prompt)[0])
                for side, made in sides.items():
                    ways = {"disk": True, "cached": False} if side == "disk" else {side: False}
                    for way, cold_files in ways.items():
                        made.reset_cache()
                        if cold_files:
                            forget(folder)
                        seconds, cached = first_token(made, prompt)
                        found.setdefault(way, []).append(seconds)
                        hits.setdefault(way, []).append(cached)
                size = sides["disk"].tiers._page_bytes * -(-length // 16)
                reads.append(read_seconds(folder, size))
        finally:
            for made in (plain, *sides.values()):
                made.close()
            shutil.rmtree(folder)
            shutil.rmtree(other)
        middle = {way: statistics.median(each) for way, each in found.items()}
        read = statistics.median(reads)
        rows.add(**{"machine": machine()} | {
            "case": "first token", "model": name, **ranks(), "tokens": length,
            "rounds": options["rounds"],
            "x_cold": {way: round(middle["cold"] / each, 2) for way, each in middle.items()},
            "x_read": round(middle["disk"] / read, 2),
            "x_read_but_step": round((middle["disk"] - middle["memory"]) / read, 2),
            "hit": {way: round(statistics.median(each) / length, 3) for way, each in hits.items()},
            "times": {way: round(each, 4) for way, each in middle.items()} | {"read": read},
        })  # fmt: skip


def slowed(made: Engine, seconds_a_token: float) -> None:
    """Has each read of the engine's tier take at least so long."""
    store = made.tiers.stores[0]
    load = store.load
    size = made.tree.page_size

    def slow(keys: Any, places: Any, out: Any) -> Any:
        # Two threads read at the same time.
        until = time.perf_counter() + 2 * seconds_a_token * size * len(places)
        result = load(keys, places, out)
        time.sleep(max(0.0, until - time.perf_counter()))
        return result

    store.load = slow
    tiers = made.tiers
    rate = tiers._page_bytes / (seconds_a_token * size)
    tiers.loads._rates[0] = Rate(rate)


def together(rows: Rows, name: str, model: str, options: dict[str, Any]) -> None:
    length = min(4000, options["longest"])
    rng = random.Random(7)
    prompt = [rng.randrange(3, 200) for _ in range(length)]
    plain = engine(model)
    computing = statistics.median(
        [(plain.reset_cache(), first_token(plain, prompt)[0])[1] for _ in range(3)]
    )
    for label, times in (("third", 1 / 3), ("equal", 1.0), ("three times", 3.0)):
        made = engine(model, host_cache="4GiB")
        try:
            for _ in range(2):
                first_token(made, prompt)
            settle(made)
            made.tree.evict(made.num_pages)
            first_token(made, [5] * 20)
            settle(made)
            each = times * computing / length
            slowed(made, each)
            loads = made.tiers.loads
            alone, computed, both = [], [], []
            decide = loads._compute_seconds
            for _ in range(options["rounds"]):
                plain.reset_cache()
                computed.append(first_token(plain, prompt)[0])
                made.reset_cache()
                loads._compute_seconds = lambda tokens, context: None  # it waits for all of it
                alone.append(first_token(made, prompt)[0])
                made.reset_cache()
                loads._compute_seconds = decide
                loads._rates[0] = Rate(loads._rates[0]._expected)
                both.append(first_token(made, prompt)[0])
        finally:
            made.close()
        middle = {
            "alone": statistics.median(alone), "computed": statistics.median(computed),
            "both": statistics.median(both),
        }  # fmt: skip
        rows.add(**{"machine": machine()} | {
            "case": "together", "model": name, **ranks(), "tokens": length, "loading": label,
            "gain": round(min(middle["alone"], middle["computed"]) / middle["both"], 2),
            "times": {way: round(value, 4) for way, value in middle.items()},
        })  # fmt: skip
    plain.close()


def every_tier(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Options of an engine with all tiers."""
    return {"host_cache": "4GiB", "disk_cache": str(folder), "disk_cache_size": "8GiB",
            "shared_cache": options["redis"]}  # fmt: skip


def ranks() -> dict[str, int]:
    """How many ranks engines have, for rows, if they have several."""
    return {"ranks": size} if (size := _RANKS["tensor_parallel_size"]) > 1 else {}


def unused(rows: Rows, name: str, model: str, options: dict[str, Any]) -> None:
    """New prompts all the time in a small pool: every page is evicted, and goes to the tiers."""
    folder = Path(tempfile.mkdtemp())
    unused_tiers(rows, name, model, options, folder, {
        "disk_cache": str(folder), "disk_cache_size": "8GiB",
    })  # fmt: skip
    if options["redis"]:
        folder = Path(tempfile.mkdtemp())
        unused_tiers(rows, name, model, options, folder, every_tier(folder, options))


def unused_tiers(
    rows: Rows,
    name: str,
    model: str,
    options: dict[str, Any],
    folder: Path,
    tiers: dict[str, Any],
) -> None:
    rng = random.Random(3)
    sides = {"without": engine(model, tokens=4096), "with": engine(model, tokens=4096, **tiers)}
    ratios = []
    try:
        for turn in range(options["turns"]):
            prompts = [[rng.randrange(3, 200) for _ in range(500)] for _ in range(6)]
            seconds = {}
            for side in sorted(sides, reverse=bool(turn % 2)):
                made = sides[side]
                begun = time.perf_counter()
                for index, prompt in enumerate(prompts):
                    made.add_request(str(index), prompt, FEW)
                while made.has_unfinished():
                    made.step()
                seconds[side] = time.perf_counter() - begun
            ratios.append(seconds["with"] / seconds["without"])
        written = sides["with"].tiers.report()
    finally:
        for made in sides.values():
            made.close()
        shutil.rmtree(folder)
    ratios.sort()
    rows.add(**{"machine": machine()} | {
        "case": "unused", "model": name, **ranks(), "turns": options["turns"],
        "tiers": [each.name for each in written.stores],
        "over": round(statistics.median(ratios), 3),
        "quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[-1 - len(ratios) // 4], 3)],
        "written_pages": [each.written_pages for each in written.stores],
        "unwritten_pages": written.unwritten_pages,
    })  # fmt: skip


def rounded(rows: Rows, name: str, model: str, options: dict[str, Any]) -> None:
    """What is lost where the disk keeps 8 bits a number; nothing for models without a text."""
    if name in MODELS:
        return
    encode = AutoTokenizer.from_pretrained(model)
    length = 1024
    windows = public_text(
        lambda text: encode(text)["input_ids"], 2 if options["quick"] else 12, length
    ).windows
    scored = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=length // 2
    )
    found: dict[str, tuple[list[float], list[int]]] = {}
    for dtype in ("auto", "int8", "fp8"):
        folder = Path(tempfile.mkdtemp())
        disk = {"disk_cache": str(folder), "disk_cache_size": "8GiB", "disk_cache_dtype": dtype}
        made = engine(model, tokens=16 * length, **disk)
        logprobs: list[float] = []
        best: list[int] = []
        try:
            for hit in (0, length // 2):
                for window in windows:
                    if not hit:
                        first_token(made, window[: length // 2 + 1])
                        continue
                    # All of it is loaded, whatever is faster.
                    made.tiers.loads._compute_seconds = lambda tokens, context: None
                    made.add_request("a", window, scored)
                    while made.has_unfinished():
                        for output in made.step():
                            scores = output.prompt_logprobs
                            assert output.cached_tokens == hit - 1, output.cached_tokens
                    logprobs += scores.logprobs[-length // 2 + 1 :].tolist()
                    best += scores.top_ids[-length // 2 + 1 :, 0].tolist()
                if not hit:
                    made.end_tiers()
                    made.close()
                    made = engine(model, tokens=16 * length, **disk)
            read = made.tiers.report().stores[0]
            pages = made.tiers._page_bytes * read.loaded_pages
        finally:
            made.close()
            shutil.rmtree(folder)
        found[dtype] = logprobs, best
        exact, same = found["auto"]
        apart = [abs(a - b) for a, b in zip(logprobs, exact, strict=True)]
        if dtype != "auto":
            more = math.exp(statistics.fmean(exact) - statistics.fmean(logprobs)) - 1
            rows.add(**{"machine": machine()} | {
                "case": "rounded", "model": name, "dtype": dtype, "tokens": len(apart),
                "logprob": {"mean": round(statistics.fmean(apart), 5),
                            "most": round(max(apart), 3)},
                "perplexity_more": round(more, 5),
                "same_best": round(statistics.fmean(map(int.__eq__, best, same)), 4),
                "bytes": round(read.loaded_bytes / pages, 3),
            })  # fmt: skip


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", default=["S", "M", "demo"])
    made.add_argument("--redis", help="address of a Redis server, for the tier of that kind")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--ranks", type=int, default=1, help="processes that share the model")
    made.add_argument("--turns", type=int, default=20)
    made.add_argument("--cache", type=Path, default=Path("build/models"))
    made.add_argument("--cases", nargs="+", default=["first", "together", "unused", "rounded"])
    arguments = made.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    rows = Rows(arguments.json)
    _RANKS["tensor_parallel_size"] = arguments.ranks
    options = vars(arguments)
    if arguments.quick:
        options |= {"rounds": 2, "turns": 4}
    cases = {
        "first": times_of_first_tokens, "together": together, "unused": unused, "rounded": rounded,
    }  # fmt: skip
    for name in arguments.models:
        model = str(checkpoint(name, arguments.cache)) if name in MODELS else name
        options["longest"] = 8000 if name in MODELS else 3999
        if name == "demo":
            model = str(Path(__file__).parent.parent / "frontend" / "demo" / "model")
        for case in arguments.cases:
            cases[case](rows, name, model, options)


if __name__ == "__main__":
    main()

"""The scheduler without a model: the cost of its order, how long requests wait, what they hit.

    python benchmarks/scheduler.py [--part queue fairness interference optimum trace
                                   million]
                                   [--trace FILE] [--json FILE] [--quick]

Parts:

    queue          processor time of a step for ordering the queue and admitting from it, with 100
                   to 100,000 requests waiting; the share of steps below a millisecond, and how many
                   requests each of the others admits
    fairness       95 % hot requests and 5 % cold ones under load: TTFT and hit rate of first come
                   first served, of longest hit first without a bound, and with the server's bound
    interference   a prompt of 16,384 tokens arrives among 16 short chats: inter-token latency with
                   and without a limit on what a step may prefill beside them
    optimum        batches known in advance: hits of lpm and dfs over those of the depth-first
                   optimum, with pools of 0.25, 0.5 and 1 times the working set
    trace          a trace of real requests with its arrival times, on a machine of 50,000 tokens a
                   second: TTFT and hit rate by policy
    million        a million requests like those of `fairness`, as fast as the simulation runs: its
                   time a request, as a multiple of a fixed loop's, and its peak memory

All but the first run in a simulation (`coppice.runtime.offline.simulation`), so their times are
those of its model of a machine.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common.harness import Rows, parser, processor, spread
from coppice.frontend.router.cluster.settings import SERVER_DEFAULTS
from coppice.radix import PagePool, RadixTree
from coppice.runtime.offline.machine import Machine
from coppice.runtime.offline.simulation import Arrival, Outcome, Simulation
from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.schedule.paging import Paging
from coppice.runtime.schedule.scheduler import Scheduler


def fresh(rng: np.random.Generator, count: int) -> array[int]:
    return array("i", rng.integers(0, 1 << 30, count, np.int32).tobytes())


# -- what the order costs ------------------------------------------------------------------------


def queue_cost(waiting_requests: int, steps: int) -> dict[str, Any]:
    """Times `steps` steps while `waiting_requests` requests wait.

    A prompt has 256 tokens of system prompt, one of 200 documents, and 32 own tokens.
    """
    rng = np.random.default_rng(0)
    tree = RadixTree(PagePool(200_000, 16))
    scheduler = Scheduler(
        Paging(tree, enable_prefix_caching=True), max_num_seqs=64, max_num_batched_tokens=2048
    )
    system, documents = fresh(rng, 256), [fresh(rng, 512) for _ in range(200)]
    params = SamplingParams()

    def add(number: int) -> None:
        prompt = system + documents[int(rng.zipf(1.3)) % 200] + fresh(rng, 32)
        scheduler.add(
            Sequence(Request(str(number), prompt, params, None, number, 0, len(prompt) + 32))
        )

    start = time.process_time()
    for number in range(waiting_requests):
        add(number)
    adding = (time.process_time() - start) / waiting_requests
    times: list[float] = []
    admitted: list[int] = []
    number = waiting_requests
    for _ in range(steps):
        before = len(scheduler.waiting)
        start = time.process_time()
        schedule = scheduler.schedule()
        times.append(time.process_time() - start)
        admitted.append(before - len(scheduler.waiting))
        for chunk in schedule.chunks:
            scheduler.computed(chunk)
            sequence = chunk.sequence
            if not sequence.remaining:
                sequence.tokens.append(0)
                if len(sequence.tokens) == sequence.request.max_length:
                    scheduler.finish(sequence)
        while len(scheduler.waiting) < waiting_requests:  # the same number waits in every step
            add(number)
            number += 1
    return {
        "waiting": waiting_requests,
        "steps": steps,
        "admitted_a_step": round(sum(admitted) / steps, 2),
        "steps_below_1_ms": round(sum(t < 1e-3 for t in times) / steps, 3),
        "admitted_by_others": spread(
            [float(count) for t, count in zip(times, admitted, strict=True) if t >= 1e-3] or [0.0]
        ),
        "times": {
            "ms_a_step": spread([t * 1e3 for t in times]),
            "us_to_add": round(adding * 1e6, 1),
        },
        "mean_ms": statistics.fmean(times) * 1e3,
    }


# -- how long requests wait ----------------------------------------------------------------------


def hot_and_cold(requests: int, load: float) -> Iterator[Arrival]:
    """One request in 20 is cold and shares nothing; hot ones share 2,400 of 2,500 tokens."""
    rng, pause = np.random.default_rng(0), random.Random(0)
    shared = fresh(rng, 2400)
    now = 0.0
    for _ in range(requests):
        cold = pause.random() < 0.05
        now += pause.expovariate(load)
        prompt = fresh(rng, 2500) if cold else shared + fresh(rng, 100)
        yield Arrival(now, prompt, 20, label="cold" if cold else "hot")


def waits(outcomes: list[Outcome]) -> dict[str, Any]:
    ttft = np.array([outcome.ttft for outcome in outcomes])
    prompts = sum(len(outcome.arrival.prompt) for outcome in outcomes)
    row = {
        "hit_rate": round(sum(outcome.hit_tokens for outcome in outcomes) / prompts, 4),
        "ttft_p50": round(float(np.percentile(ttft, 50)), 3),
        "ttft_p99": round(float(np.percentile(ttft, 99)), 3),
    }
    cold = [outcome.ttft for outcome in outcomes if outcome.arrival.label == "cold"]
    if cold:
        row["cold_ttft_p99"] = round(float(np.percentile(cold, 99)), 3)
        row["cold_share_of_ttft"] = round(sum(cold) / float(ttft.sum()), 3)
    return row


def by_policy(
    arrivals: Callable[[], Iterator[Arrival]], machine: Machine, pool: int
) -> Iterator[dict[str, Any]]:
    """Serves the same arrivals by three policies; the third is the server's."""
    for name, policy, overtaking in (
        ("fcfs", "fcfs", None),
        ("lpm without bound", "lpm", None),
        ("lpm", "lpm", SERVER_DEFAULTS["overtaking"]),
    ):
        simulation = Simulation(machine, pool_tokens=pool, policy=policy, overtaking=overtaking)
        start = time.perf_counter()
        outcomes = simulation.run(arrivals())
        seconds = time.perf_counter() - start
        yield {
            "policy": name,
            "requests": len(outcomes),
            **waits(outcomes),
            "times": {"us_a_request": round(seconds / len(outcomes) * 1e6, 1)},
        }


# -- prefills beside decodes ---------------------------------------------------------------------


def interference(stretch: float | None) -> dict[str, Any]:
    """Simulates 16 chats, among which a prompt of 16,384 tokens arrives; gaps of their tokens."""
    rng = np.random.default_rng(0)
    chats = [Arrival(0.0, fresh(rng, 64), 400, label="chat") for _ in range(16)]
    long = Arrival(1.0, fresh(rng, 16_384), 4, label="long")
    # A step takes 10 ms, and 20 us for each token: a GPU with a model of about 8B parameters.
    simulation = Simulation(Machine(0.010, 20e-6), pool_tokens=100_000, max_step_stretch=stretch)
    outcomes = simulation.run([*chats, long])
    chat = {gap: count for (label, gap), count in simulation.gaps.items() if label == "chat"}
    gaps = np.repeat(list(chat), list(chat.values()))
    p50, p99 = np.percentile(gaps, 50), np.percentile(gaps, 99)
    return {
        "max_step_stretch": stretch,
        "itl_p99_over_p50": round(float(p99 / p50), 2),
        "long_ttft": round(outcomes[-1].ttft, 2),
    }


# -- order against the optimum -------------------------------------------------------------------


def random_tree(rng: np.random.Generator) -> list[array[int]]:
    """The paths to all nodes of a random prefix tree of 400 nodes."""
    paths: list[array[int]] = [array("i")]
    for _ in range(400):
        parent = paths[int(rng.integers(len(paths)))]
        paths.append(parent + fresh(rng, int(rng.integers(20, 200))))
    return [path + fresh(rng, 8) for path in paths[1:]]


def few_shot(rng: np.random.Generator) -> list[array[int]]:
    templates = [fresh(rng, 1500) for _ in range(20)]
    return [template + fresh(rng, 60) for template in templates for _ in range(25)]


def conversations(rng: np.random.Generator) -> list[array[int]]:
    prompts = []
    for _ in range(60):
        text = fresh(rng, 200)
        for _ in range(8):
            text = text + fresh(rng, int(rng.integers(50, 300)))
            prompts.append(text)
    return prompts


def agents(rng: np.random.Generator) -> list[array[int]]:
    """A system prompt, a set of tools, a task, and steps that branch."""
    system = fresh(rng, 600)
    prompts = []
    for _ in range(6):
        tools = system + fresh(rng, 1200)
        for _ in range(10):
            task = tools + fresh(rng, 150)
            for _ in range(3):
                branch = task
                for _ in range(4):
                    branch = branch + fresh(rng, 80)
                    prompts.append(branch)
    return prompts


def optimum(
    make: Callable[[np.random.Generator], list[array[int]]], policy: str, share: float
) -> dict[str, Any]:
    """Hits of one batch over the optimum: every distinct token computed once, depth first."""
    rng = np.random.default_rng(1)
    prompts = make(rng)
    random.Random(0).shuffle(prompts)
    ordered = sorted(prompt.tobytes() for prompt in prompts)
    distinct, before = 0, b""
    for tokens in ordered:
        distinct += len(tokens) // 4 - _shared(before, tokens)
        before = tokens
    longest = max(len(prompt) for prompt in prompts) + 2
    pool = max(int(distinct * share), longest)
    # One request runs at a time, so that only the order matters.
    simulation = Simulation(
        Machine(0.0, 1.0), pool_tokens=pool, page_size=1, max_num_seqs=1, policy=policy,
        max_num_batched_tokens=1 << 20,
    )  # fmt: skip
    outcomes = simulation.run([Arrival(0.0, prompt, 1) for prompt in prompts])
    total = sum(len(prompt) for prompt in prompts)
    # Of a prompt that comes again, the last token is computed again.
    best = total - distinct - (len(ordered) - len(set(ordered)))
    hits = sum(outcome.hit_tokens for outcome in outcomes)
    return {"hit_rate": round(hits / total, 4), "of_the_optimum": round(hits / best, 4)}


def _shared(left: bytes, right: bytes) -> int:
    a, b = np.frombuffer(left, np.int32), np.frombuffer(right, np.int32)
    count = min(len(a), len(b))
    differing = np.flatnonzero(a[:count] != b[:count])
    return int(differing[0]) if len(differing) else count


# -- a real trace --------------------------------------------------------------------------------


def trace_arrivals(trace: Path, limit: int) -> Iterator[Arrival]:
    """Mooncake's format: each hash id stands for 512 tokens (see `common/tree_workloads.py`)."""
    from common.tree_workloads import workload_f

    with trace.open() as lines:
        for number, (line, work) in enumerate(zip(lines, workload_f(trace, False), strict=True)):
            if number == limit:
                return
            request = json.loads(line)
            prompt = array("i", work.prompt)
            yield Arrival(request["timestamp"] / 1e3, prompt, max(1, request["output_length"]))


# -- a million requests --------------------------------------------------------------------------


def many(requests: int) -> dict[str, Any]:
    """Serves the requests as a stream; of each, only its wait and its hit are kept."""
    simulation = Simulation(
        Machine(0.010, 40e-6), pool_tokens=400_000, overtaking=SERVER_DEFAULTS["overtaking"]
    )
    ttft, hits, loop = array("d"), 0, fixed_loop()
    start = time.process_time()
    for outcome in simulation.serve(hot_and_cold(requests, 70.0)):
        ttft.append(outcome.ttft)
        hits += outcome.hit_tokens
    seconds = (time.process_time() - start) / requests
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "requests": requests,
        "simulated_hours": round(simulation.now / 3600, 2),
        "steps": simulation.steps,
        "hit_rate": round(hits / (2500 * requests), 4),
        "ttft_p50": round(float(np.percentile(ttft, 50)), 3),
        "ttft_p99": round(float(np.percentile(ttft, 99)), 3),
        "fixed_loops_a_request": round(seconds / ((loop + fixed_loop()) / 2), 2),
        "peak_mib": round(peak),
        "times": {"us_a_request": round(seconds * 1e6, 1)},
    }


def fixed_loop() -> float:
    """Processor seconds of 1,000 rounds of a plain loop on this machine, as a unit of time."""
    start, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number & 7
    return (time.process_time() - start) / 1000


def main() -> None:
    options = parser(__doc__)
    parts = ("queue", "fairness", "interference", "optimum", "trace", "million")
    options.add_argument("--part", nargs="+", choices=parts, default=list(parts[:-2]))
    options.add_argument("--trace", type=Path, help="the trace of the part `trace`")
    args = options.parse_args()
    if "trace" in args.part and args.trace is None:
        options.error("--part trace needs --trace FILE")
    rows, quick = Rows(args.json), args.quick

    def add(part: str, **row: Any) -> None:
        rows.add(benchmark="scheduler", part=part, **row, machine=processor())

    if "queue" in args.part:
        sizes = (100, 1_000) if quick else (100, 1_000, 10_000, 100_000)
        costs = [queue_cost(size, 50 if quick else 300) for size in sizes]
        least = costs[0]["mean_ms"]
        for row in costs:
            ratio = row.pop("mean_ms") / least
            add("queue", **row, over_100=round(ratio, 2))
    if "fairness" in args.part:
        requests = 2_000 if quick else 20_000
        for row in by_policy(lambda: hot_and_cold(requests, 100.0), Machine(0.010, 40e-6), 400_000):
            add("fairness", **row)
    if "interference" in args.part:
        for stretch in (None, SERVER_DEFAULTS["max_step_stretch"]):
            add("interference", **interference(stretch))
    if "optimum" in args.part:
        shares = (0.5,) if quick else (0.25, 0.5, 1.0)
        for make in (random_tree, few_shot, conversations, agents):
            for policy in ("lpm", "dfs"):
                for share in shares:
                    row = optimum(make, policy, share)
                    add("optimum", batch=make.__name__, policy=policy, pool=share, **row)
    if "million" in args.part:
        add("million", **many(10_000 if quick else 1_000_000))
    if "trace" in args.part:
        limit = 1_000 if quick else 12_031
        for row in by_policy(
            lambda: trace_arrivals(args.trace, limit), Machine(0.005, 20e-6), 3_000_000
        ):
            add("trace", **row)


if __name__ == "__main__":
    main()

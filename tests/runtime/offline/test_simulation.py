"""Scheduling figures that can be worked out by hand, from the scheduler on a simulated machine."""

from __future__ import annotations

import random
from array import array
from importlib import import_module
from pathlib import Path

import pytest

from coppice.runtime.offline.simulation import Arrival, Machine, Simulation
from coppice.runtime.schedule.step_times import LEAST_PREFILL, StepTimes


def arrival(number: int, tokens: int, output: int, time: float = 0.0, label: str = "") -> Arrival:
    prompt = array("i", range(number * 100_000, number * 100_000 + tokens))
    return Arrival(time, prompt, output, label=label)


@pytest.mark.parametrize(
    ("outputs", "efficiency"), [((32, 128, 64, 256), 0.46875), ((10, 50, 100, 200), 0.45)]
)
def test_a_static_batch_wastes_what_textbooks_say(outputs, efficiency):
    """Four at a time, and the next four when the longest has ended; continuously, none is idle."""
    static = Simulation(Machine(1.0, 0.0), pool_tokens=10_000, max_num_seqs=4)
    static.run([arrival(number, 1, count) for number, count in enumerate(outputs)])
    assert static.decoded == sum(outputs)
    assert static.steps == max(outputs)
    assert static.decoded / (4 * static.steps) == efficiency

    continuous = Simulation(Machine(1.0, 0.0), pool_tokens=100_000, max_num_seqs=4)
    continuous.run([arrival(number, 1, outputs[number % 4]) for number in range(400)])
    assert continuous.decoded / (4 * continuous.steps) > 0.97


def test_a_prompt_of_8192_tokens_takes_four_chunks_of_2048():
    simulation = Simulation(Machine(1.0, 0.0), pool_tokens=10_000, max_num_batched_tokens=2048)
    (outcome,) = simulation.run([arrival(0, 8192, 1)])
    assert simulation.steps == 4
    assert outcome.ttft == 4.0


def test_the_last_pages_waste_little():
    """At page size 16, over sequences of 200 to 999 tokens, a few parts in a hundred."""
    simulation = Simulation(Machine(1.0, 0.0), pool_tokens=200_000, max_num_seqs=100)
    simulation.run([arrival(number, 200 + 8 * number, 1) for number in range(100)])
    pages = simulation.tree.cached_pages
    assert 0 < 1 - simulation.tree.cached_tokens / (16 * pages) < 0.04


def test_time_is_what_the_machine_says():
    simulation = Simulation(Machine(step=1.0, token=0.01), pool_tokens=1000)
    first, second = simulation.run([arrival(0, 100, 3), arrival(1, 10, 1, time=50.0)])
    assert first.ttft == pytest.approx(2.0)
    assert first.end == pytest.approx(2.0 + 2 * 1.01)
    assert second.ttft == pytest.approx(1.1)
    assert simulation.gaps == {("", 1.01): 2}


def test_hits_come_from_the_tree():
    simulation = Simulation(Machine(1.0, 0.0), pool_tokens=1000)
    one, two = simulation.run([arrival(0, 100, 1), arrival(0, 100, 1, time=10.0)])
    assert (one.hit_tokens, two.hit_tokens) == (0, 99)


def test_bad_arrivals_are_refused():
    simulation = Simulation(Machine(1.0, 0.0), pool_tokens=64)
    with pytest.raises(ValueError, match="number 0 has 65 tokens, more than the pool"):
        simulation.run([arrival(0, 64, 1)])
    simulation = Simulation(Machine(1.0, 0.0), pool_tokens=64)
    with pytest.raises(ValueError, match="times must not decrease"):
        simulation.run([arrival(0, 4, 1, time=2.0), arrival(1, 4, 1, time=1.0)])


def test_no_one_starves_behind_hot_traffic():
    """Cold requests wait about as long as first come first served would let them."""

    def arrivals():
        hot = array("i", range(500))
        for number in range(600):
            cold = number % 20 == 0
            own = range(10_000 + number * 1000, 10_000 + number * 1000 + (500 if cold else 10))
            prompt = array("i", own) if cold else hot + array("i", own)
            yield Arrival(number * 0.008, prompt, 4, label="cold" if cold else "hot")

    def run(policy, overtaking):
        simulation = Simulation(
            Machine(0.01, 2e-4), pool_tokens=20_000, max_num_seqs=4, policy=policy,
            overtaking=overtaking, max_num_batched_tokens=512,
        )  # fmt: skip
        outcomes = simulation.run(arrivals())
        cold = sorted(o.ttft for o in outcomes if o.arrival.label == "cold")
        return cold[-1], sum(outcome.hit_tokens for outcome in outcomes)

    fcfs, _ = run("fcfs", None)
    unbounded, most_hits = run("lpm", None)
    bounded, hits = run("lpm", 0.15)
    assert unbounded > 1.25 * fcfs, "the mix is not one that starves anyone"
    assert bounded < 1.2 * fcfs
    assert hits >= 0.98 * most_hits


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", ["lpm", "dfs"])
@pytest.mark.parametrize("pool", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("batch", ["random_tree", "few_shot", "conversations", "agents"])
def test_batches_known_in_advance_hit_what_depth_first_order_would(
    batch, pool, policy, monkeypatch
):
    """The batches are the benchmark's; of a shuffled one at least 98 % of the optimum is hit."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    benchmark = import_module("scheduler")
    row = benchmark.optimum(getattr(benchmark, batch), policy, pool)
    assert 0.98 <= row["of_the_optimum"] <= 1
    assert row["hit_rate"] > 0.75
    if pool == 0.25 and policy == "lpm":
        first_come = benchmark.optimum(getattr(benchmark, batch), "fcfs", pool)
        assert first_come["hit_rate"] < row["hit_rate"], "the order matters"


def test_a_long_prompt_does_not_stall_those_who_decode():
    def longest_gap(stretch):
        simulation = Simulation(Machine(0.01, 1e-4), pool_tokens=40_000, max_step_stretch=stretch)
        chats = [arrival(number, 20, 300, label="chat") for number in range(8)]
        outcomes = simulation.run([*chats, arrival(9, 16_000, 1, time=1.0, label="long")])
        assert outcomes[-1].end > 0
        gaps = sorted(
            gap
            for (label, gap), count in simulation.gaps.items()
            for _ in range(count)
            if label == "chat"
        )
        return gaps[int(0.99 * len(gaps))] / gaps[len(gaps) // 2]

    assert longest_gap(None) > 10
    assert longest_gap(2.5) < 3


def test_step_times_know_no_limit_before_both_kinds_were_seen():
    times = StepTimes(2.0)
    assert times.prefill_tokens(4) is None
    times.observe(4, [], 0.010)
    assert times.prefill_tokens(4) is None
    times.observe(0, [(2000, 0)], 0.400)  # alone is all that is known yet
    assert times.prefill_tokens(4) == pytest.approx(50, rel=0.1)
    with pytest.raises(ValueError, match="stretch must be more than 1"):
        StepTimes(1.0)


def observe(times, seconds, steps=100, seed=0):
    """Shows steps of a machine; prompts come as the limit lets them, in one step of two."""
    rng = random.Random(seed)
    for _ in range(steps):
        decodes, limit = rng.randrange(1, 64), times.prefill_tokens(32)
        tokens = rng.choice((0, min(rng.randrange(1, 400), limit or 400)))
        times.observe(decodes, [(tokens, 0)] if tokens else [], seconds(decodes, tokens))


def test_step_times_find_what_each_part_costs():
    times = StepTimes(2.5)
    observe(times, lambda decodes, tokens: 0.01 + 0.0002 * decodes + 0.0001 * tokens)
    assert times.prefill_tokens(32) == pytest.approx(1.5 * 0.0164 / 0.0001, rel=0.02)
    assert times.prefill_tokens(4) == pytest.approx(1.5 * 0.0108 / 0.0001, rel=0.02)
    observe(times, lambda decodes, tokens: 0.01 + 0.0002 * decodes + 0.0004 * tokens, 200)
    assert times.prefill_tokens(32) == pytest.approx(1.5 * 0.0164 / 0.0004, rel=0.02)
    observe(times, lambda decodes, tokens: 0.01 + 0.1 * tokens, 200)
    assert times.prefill_tokens(32) == LEAST_PREFILL


def test_a_machine_that_stood_still_does_not_keep_prompts_waiting():
    def seconds(decodes, tokens):
        return 0.01 + 0.0002 * decodes + 0.0001 * tokens

    times = StepTimes(2.5)
    observe(times, seconds)
    before = times.prefill_tokens(32)
    times.observe(32, [(100, 0)], 5.0)  # suspended in the middle of it
    assert times.prefill_tokens(32) > before / 2
    times.observe(32, [], 5.0)
    observe(times, seconds, 20)
    assert times.prefill_tokens(32) == pytest.approx(before, rel=0.3)


def test_what_any_prompt_costs_a_step_is_not_laid_on_its_tokens():
    """Else few tokens look dear, so that fewer come, which look dearer still."""

    def seconds(decodes, tokens):
        return 0.01 + (0.02 if tokens and decodes else 0.0) + 0.0001 * tokens

    times = StepTimes(2.5)
    for _ in range(100):
        times.observe(64, [(LEAST_PREFILL, 0)], seconds(64, LEAST_PREFILL))
    observe(times, seconds)
    half = 1.5 * 0.01 / 2 / 0.0001  # of what is allowed: the constant alone is more than all of it
    assert 0.6 * half < times.prefill_tokens(64) < 1.1 * half


def test_step_times_know_that_a_long_context_costs():
    times = StepTimes(2.5)
    for context in range(0, 32_000, 100):
        times.observe(16, [(100, context)], 0.01 + 100 * (1e-4 + 1e-8 * context))
        times.observe(16, [], 0.01)
    assert times.prefill_tokens(16, 0) == pytest.approx(150, rel=0.1)
    assert times.prefill_tokens(16, 30_000) == pytest.approx(0.015 / 4e-4, rel=0.1)


def test_steps_that_are_repeated_are_those_that_would_have_come_one_by_one(monkeypatch):
    """Only what it costs to simulate them differs."""
    repeated = []
    repeat = Simulation._repeat

    def counted(*args):
        repeated.append(args)
        repeat(*args)

    def outcome(policy):
        rng = random.Random(5)
        simulation = Simulation(
            Machine(0.01, 1e-4), pool_tokens=3000, page_size=4, max_num_seqs=6, policy=policy,
            overtaking=0.15, max_num_batched_tokens=256, max_step_stretch=2.5,
        )  # fmt: skip
        time, arrivals = 0.0, []
        for number in range(120):
            time += rng.expovariate(3.0)
            own = array("i", range(number * 1000, number * 1000 + rng.randint(5, 200)))
            prompt = array("i", range(9_000_000, 9_000_000 + rng.choice([0, 80, 300]))) + own
            arrivals.append(Arrival(time, prompt, rng.randint(1, 150), priority=number % 2))
        found = [
            (each.hit_tokens, pytest.approx(each.first_token), pytest.approx(each.end))
            for each in simulation.run(arrivals)
        ]
        gaps = {(label, round(gap, 4)): 0 for label, gap in simulation.gaps}
        for (label, gap), count in simulation.gaps.items():
            gaps[label, round(gap, 4)] += count
        tree = simulation.tree
        return found, gaps, simulation.steps, simulation.decoded, tree.evicted_tokens

    for policy in ("lpm", "priority"):
        monkeypatch.setattr(Simulation, "_repeat", counted)
        expected = outcome(policy)
        monkeypatch.setattr(Simulation, "_repeat", lambda *args: None)
        assert outcome(policy) == expected
        assert repeated


def test_outcomes_come_as_they_end_and_are_put_in_order():
    simulation = Simulation(Machine(1.0, 0.0), pool_tokens=1000)
    arrivals = [arrival(0, 10, 5), arrival(1, 10, 2)]
    assert [each.number for each in simulation.serve(arrivals)] == [1, 0]
    simulation = Simulation(Machine(1.0, 0.0), pool_tokens=1000)
    assert [each.number for each in simulation.run(arrivals)] == [0, 1]

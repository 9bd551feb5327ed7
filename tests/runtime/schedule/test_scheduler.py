"""The scheduler without a model: random schedules over tiny pools, recounted each step."""

import random
from array import array

import pytest

from coppice.radix import PagePool, RadixTree, check
from coppice.runtime.requests.request import Request, Sequence, Status
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.schedule.chunks import Chunk
from coppice.runtime.schedule.paging import Paging
from coppice.runtime.schedule.scheduler import Scheduler


class Machine:
    """Drives a scheduler with a scripted model; the KV of a slot is its (namespace, prefix)."""

    def __init__(
        self, pages, page_size, *, seqs=4, tokens=16, caching=True, policy="lpm", stretch=None
    ):
        self.size = page_size
        self.tree = RadixTree(PagePool(pages, page_size))
        self.paging = Paging(self.tree, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            self.paging, max_num_seqs=seqs, max_num_batched_tokens=tokens, overtaking=0.15,
            policy=policy, max_step_stretch=stretch,
        )  # fmt: skip
        self.memory = {}
        self.sequences = {}
        self.arrivals = 0
        self.finished = []
        self.computed = 0
        self.max_tokens = pages * page_size

    def add(self, tokens, max_new=4, namespace=None, priority=0):
        request = Request(
            str(self.arrivals), array("i", tokens), SamplingParams(), namespace, self.arrivals, 0,
            min(len(tokens) + max_new, self.max_tokens), priority,
        )  # fmt: skip
        self.arrivals += 1
        sequence = Sequence(request)
        self.sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        return sequence

    @staticmethod
    def next_token(tokens):
        return sum(tokens) % 3

    def step(self):
        schedule = self.scheduler.schedule()
        for copy in schedule.copies:
            for slot in range(self.size):
                self.memory[copy.target, slot] = self.memory.get((copy.source, slot))
        total = 0
        for chunk in schedule.chunks:
            sequence, size = chunk.sequence, self.size
            total += chunk.count
            key = sequence.request.namespace
            for position in range(sequence.computed, sequence.computed + chunk.count):
                slot = sequence.table[position // size], position % size
                self.memory[slot] = key, tuple(sequence.tokens[: position + 1])
        assert total <= self.scheduler.max_num_batched_tokens
        assert len(schedule.chunks) <= self.scheduler.max_num_seqs
        for chunk in schedule.chunks:
            # Attention reads every position up to the end of the chunk.
            sequence = chunk.sequence
            for position in range(sequence.computed + chunk.count):
                slot = sequence.table[position // self.size], position % self.size
                expected = sequence.request.namespace, tuple(sequence.tokens[: position + 1])
                assert self.memory.get(slot) == expected, "attention would read wrong KV"
        self.computed += total
        for chunk in schedule.chunks:
            end = chunk.count == chunk.sequence.remaining
            self.scheduler.computed(chunk)
            if end:
                self.sample(chunk.sequence)
        self.check()
        return schedule

    def sample(self, sequence):
        sequence.tokens.append(self.next_token(sequence.tokens))
        if len(sequence.tokens) >= sequence.request.max_length:
            self.end(sequence)
            self.finished.append(sequence)

    def end(self, sequence):
        self.scheduler.finish(sequence)
        del self.sequences[sequence.request.request_id]

    def check(self):
        check(self.tree, [(s.hold, s.table) for s in self.scheduler.running])
        alive = {id(s) for s in (*self.scheduler.running, *self.scheduler.waiting)}
        assert alive == {id(s) for s in self.sequences.values()}

    def drain(self, limit=5000):
        steps = 0
        while self.sequences:
            assert self.step().chunks, "unfinished requests, but an empty step"
            steps += 1
            assert steps < limit, "the scheduler makes no progress"
        assert self.tree.pool.free_pages + self.tree.cached_pages == self.tree.pool.num_pages
        assert self.tree.locked_pages == 0
        return steps


def expected(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(Machine.next_token(tokens))
    return tokens


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 12), marks=pytest.mark.slow)])
def test_random_schedules_over_tiny_pools_lose_no_page_and_no_token(page_size, caching, seeds):
    for seed in seeds:
        rng = random.Random(seed)
        pages = rng.randrange(8 // page_size + 2, 96 // page_size + 3)
        machine = Machine(pages, page_size, seqs=rng.randrange(1, 6),
                          tokens=rng.randrange(6, 40), caching=caching)  # fmt: skip
        prompts = {}
        for _ in range(150):
            if rng.random() < 0.35:
                longest = min(60, machine.max_tokens - 1)
                prompt = [rng.randrange(2) for _ in range(rng.randrange(1, longest + 1))]
                if prompts and rng.random() < 0.5:
                    other = rng.choice(list(prompts.values()))
                    prompt = (other[: rng.randrange(1, len(other) + 1)] + prompt)[:longest]
                new = rng.randrange(1, 12)
                sequence = machine.add(prompt, new, rng.choice([None, None, "salt"]))
                prompts[sequence.request.request_id] = prompt
            elif rng.random() < 0.1 and machine.sequences:
                machine.end(rng.choice(list(machine.sequences.values())))
                machine.check()
            else:
                machine.step()
        machine.drain()
        for sequence in machine.finished:
            prompt = prompts[sequence.request.request_id]
            new = sequence.request.max_length - len(prompt)
            assert list(sequence.tokens) == expected(prompt, new)
            assert -1 < sequence.cached_tokens < len(prompt)


def test_preemption_happens_and_resumes_from_the_tree():
    machine = Machine(pages=8, page_size=4, seqs=4, tokens=64)
    prompts = [[i] * 7 for i in range(3)]
    for prompt in prompts:
        machine.add(prompt, max_new=8)
    machine.drain()
    assert machine.scheduler.counters.preemptions > 0
    assert sorted(list(s.tokens) for s in machine.finished) == sorted(
        expected(p, 8) for p in prompts
    )


def test_a_sequence_as_long_as_the_pool_ends_although_its_hit_needs_a_page_more():
    machine = Machine(pages=4, page_size=4, seqs=4, tokens=64)
    machine.add([1] * 10, max_new=6)
    machine.drain()
    # It hits 9 tokens: three locked pages, of which the third has to be copied for its own branch.
    machine.add([1] * 9 + [2], max_new=6)
    assert machine.scheduler.counters.preemptions == 0
    machine.drain()
    assert machine.scheduler.counters.preemptions == 1  # it had to start again without its hit
    assert list(machine.finished[-1].tokens) == expected([1] * 9 + [2], 6)


def test_the_longest_hit_is_first_and_equals_follow_in_order_of_arrival():
    machine = Machine(pages=64, page_size=4, seqs=1, tokens=64)
    machine.add([1] * 20, max_new=1)
    machine.drain()
    cold = machine.add([2] * 20, max_new=1)
    short = machine.add([1] * 6 + [2] * 14, max_new=1)
    long = machine.add([1] * 12 + [2] * 8, max_new=1)
    second = machine.add([2] * 20, max_new=1)
    machine.finished.clear()
    machine.drain()
    assert machine.finished.index(long) < machine.finished.index(short)
    assert machine.finished.index(short) < machine.finished.index(cold)
    assert machine.finished.index(cold) < machine.finished.index(second)


def test_hot_traffic_lets_nothing_wait_for_ever():
    machine = Machine(pages=64, page_size=4, seqs=1, tokens=64)
    machine.add([1] * 30, max_new=1)
    machine.drain()
    cold = machine.add([2] * 20, max_new=1)
    passed = 0
    while cold.status is not Status.FINISHED:
        machine.add([1] * 29 + [3], max_new=1)
        machine.step()
        passed += 1
        assert passed < 50
    assert 1 < passed <= 6  # overtaken at least once, but by little more than a step's work


def test_a_prefix_that_several_need_is_computed_once():
    machine = Machine(pages=64, page_size=4, seqs=8, tokens=512)
    system = list(range(10, 30))
    document = list(range(100, 140))
    machine.add([*system, 1], max_new=1)
    machine.drain()
    before = machine.computed
    for question in range(6):
        machine.add([*system, *document, 1000 + question, 1001], max_new=1)
    first = machine.step()
    assert [chunk.count for chunk in first.chunks] == [
        42
    ]  # the leader alone, after the cached prefix
    machine.drain()
    assert machine.computed - before == 42 + 5 * 2


def test_long_prompts_are_chunked_beside_running_decodes():
    machine = Machine(pages=128, page_size=4, seqs=8, tokens=16)
    chat = machine.add([1, 2, 3], max_new=12)
    machine.step()
    machine.add(list(range(50, 98)), max_new=1)
    for _ in range(3):
        schedule = machine.step()
        counts = {id(c.sequence): c.count for c in schedule.chunks}
        assert counts.pop(id(chat)) == 1  # never stalled
        assert list(counts.values()) == [15]
    machine.drain()


def test_a_step_takes_more_of_many_prompts_that_wait_than_of_one():
    def prompt_tokens(waiting):
        machine = Machine(pages=1024, page_size=4, seqs=7, tokens=1024, stretch=2.0)
        for decodes in range(1, 60):
            machine.scheduler.times.observe(decodes, [], 0.020)
            machine.scheduler.times.observe(0, [(10 * decodes, 0)], 0.001 * 10 * decodes)
        machine.add([1, 2, 3], max_new=12)
        machine.step()
        for number in range(waiting):
            machine.add([10 + number] * 200, max_new=1)
        found = sum(chunk.count for chunk in machine.step().chunks) - 1
        machine.drain()
        return found

    one, six = prompt_tokens(1), prompt_tokens(6)
    assert 15 < one < 25 and six == pytest.approx(6 * one, abs=6)
    assert prompt_tokens(12) == six, "for seven sequences at a time, six more begin at most"


def test_drafts_count_in_what_decodes_take():
    machine = Machine(pages=1024, page_size=4, seqs=7, tokens=1024, stretch=2.0)
    times = machine.scheduler.times
    times.observe(0, [(100, 0)], 0.100)
    machine.add([1, 2, 3], max_new=300)
    machine.step()
    for number in range(200):
        schedule = machine.step()
        schedule.drafted = 20 * (number % 2)
        machine.scheduler.observe(schedule, 0.010 + 0.002 * (1 + schedule.drafted))
    # Four such sequences have 44 rows, at a millisecond for each token of a prompt.
    assert times.prefill_tokens(4, waiting=0) == pytest.approx(98, rel=0.2)
    machine.drain()


def test_a_follow_up_turn_hits_prompt_and_answer_and_continues_in_their_last_page():
    machine = Machine(pages=32, page_size=16, seqs=4, tokens=64)
    first = machine.add([1, 2, 3, 4, 5], max_new=4)
    machine.drain()
    turn = [*first.tokens, 9, 9]
    second = machine.add(turn, max_new=2)
    schedule = machine.step()
    assert second.cached_tokens == 8  # all but the last answer token, whose KV was never needed
    assert not schedule.copies
    # A third one with the same history while the second one writes there has to copy.
    third = machine.add([*first.tokens, 8], max_new=2)
    assert len(machine.step().copies) == 1
    assert third.cached_tokens == 9
    machine.drain()


def test_a_class_waits_for_as_long_as_a_better_one_brings_work():
    """No bound protects it from better ones. When those are served, it has its own order."""
    machine = Machine(pages=64, page_size=4, seqs=1, tokens=64, policy="priority")
    low = [machine.add([2 + n] * 20, max_new=1, priority=1) for n in range(3)]
    for number in range(60):
        machine.add([100 + number] * 9, max_new=1, priority=0)
        machine.step()
        assert all(each.status is Status.WAITING for each in low)
    machine.drain()
    served = [each for each in machine.finished if each in low]
    assert served == low and machine.finished[-3:] == low


def test_within_a_class_nothing_waits_for_ever():
    machine = Machine(pages=64, page_size=4, seqs=1, tokens=64, policy="priority")
    machine.add([1] * 30, max_new=1, priority=1)
    machine.drain()
    cold = machine.add([2] * 20, max_new=1, priority=1)
    passed = 0
    while cold.status is not Status.FINISHED:
        machine.add([1] * 29 + [3], max_new=1, priority=1)
        if passed % 3 == 2:  # work of a better class is no reason to let it overtake
            machine.add([50 + passed] * 64, max_new=1, priority=0)
        machine.step()
        passed += 1
        assert passed < 50
    assert 1 < passed <= 8


def test_a_better_class_takes_place_and_pages_and_gives_none():
    machine = Machine(pages=12, page_size=4, seqs=2, tokens=64, policy="priority")
    low = [machine.add([1 + n] * 8, max_new=24, priority=2) for n in range(2)]
    machine.step()
    assert all(each.status is Status.RUNNING for each in low)
    high = machine.add([9] * 12, max_new=30, priority=0)
    for _ in range(29):
        machine.step()
        assert high.status is Status.RUNNING, "nothing took its place or its pages"
    assert machine.scheduler.counters.preemptions >= 1
    machine.drain()
    assert machine.finished[0] is high
    for sequence in machine.finished:
        prompt = sequence.request.prompt_token_ids
        new = sequence.request.max_length - len(prompt)
        assert list(sequence.tokens) == expected(prompt, new)


def test_a_worse_class_does_not_pass_a_sequence_that_does_not_fit():
    """Else each would be preempted for it in the next step."""
    machine = Machine(pages=12, page_size=4, seqs=4, tokens=64, policy="priority")
    first = machine.add([1] * 20, max_new=12, priority=0)
    machine.step()
    second = machine.add([2] * 30, max_new=2, priority=0)
    low = machine.add([3] * 4, max_new=2, priority=1)
    while first.status is Status.RUNNING:
        machine.step()
        assert second.status is low.status is Status.WAITING or first.status is Status.FINISHED
    machine.drain()
    assert machine.scheduler.counters.preemptions == 0
    equal = Machine(pages=12, page_size=4, seqs=4, tokens=64)
    equal.add([1] * 20, max_new=12)
    equal.step()
    equal.add([2] * 30, max_new=2)
    passing = equal.add([3] * 4, max_new=2)
    equal.step()
    assert passing.status is Status.RUNNING, "within a class one that fits passes one that does not"


def test_the_sequence_that_costs_least_to_resume_is_preempted():
    """Shared tokens stay, so each of two that share some loses less than a third one."""
    machine = Machine(pages=20, page_size=4, seqs=4, tokens=64)
    machine.add([9] * 8, max_new=60)
    machine.step()
    document = list(range(100, 120))
    first = machine.add([*document, 1, 1], max_new=20)
    machine.step()
    second = machine.add([*document, 2, 2], max_new=20)
    last = machine.add(list(range(200, 222)), max_new=20)
    computed = 0
    while not machine.scheduler.counters.preemptions:
        computed = second.computed
        machine.step()
    assert machine.scheduler.counters.preemptions == 1
    assert second.status is Status.WAITING, "it has the fewest tokens of its own"
    assert first.status is last.status is Status.RUNNING
    assert machine.paging.cached(second) > computed - 4, "all but the page that was needed"
    machine.drain()
    for sequence in machine.finished:
        prompt = sequence.request.prompt_token_ids
        new = sequence.request.max_length - len(prompt)
        assert list(sequence.tokens) == expected(prompt, new)


def test_one_that_does_not_fit_is_passed_only_within_the_bound():
    machine = Machine(pages=32, page_size=4, seqs=2, tokens=64)
    machine.add([9] * 40, max_new=80)  # it holds more and more pages
    machine.step()
    large = machine.add([1] * 80, max_new=2)
    passed = 0
    while large.status is Status.WAITING:
        machine.add([2 + passed] * 20, max_new=2)
        machine.step()
        passed = len(machine.finished)
        assert passed < 40
    assert 1 < passed <= 5, "some passed it, and then none"
    machine.drain()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_leaders_and_followers_at_any_depth(depth):
    """None of a tree of prompts is cached: each branch is computed once, by one of its requests."""
    machine = Machine(pages=512, page_size=4, seqs=64, tokens=4096)
    prompts = [[7] * 24]
    for level in range(depth):
        prompts = [[*p, *range(100 * n, 100 * n + 24)] for p in prompts
                   for n in (level + 1, level + 11)]  # fmt: skip
    for prompt in prompts:
        for question in range(4):
            machine.add([*prompt, 5000 + question, 6000], max_new=1)
    steps = machine.drain()
    assert steps == depth + 2, "one step for each level, and one for the followers"
    branches = 24 * sum(2**level for level in range(depth + 1))
    assert machine.computed == branches + 2 * 4 * len(prompts)


def test_one_token_of_a_resumed_prefill_is_no_decode():
    """Others follow it: a draft would be computed in their place."""
    machine = Machine(8, 4)
    sequence = machine.add([1, 2, 3])
    sequence.tokens.extend([4, 5, 6])
    for computed in range(6):
        sequence.computed = computed
        assert Chunk(sequence, 1).decode == (computed == 5)
        assert not Chunk(sequence, 2).decode

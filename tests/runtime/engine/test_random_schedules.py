"""In any schedule each request gets the tokens and scores that it gets alone; no page is lost.

    COPPICE_SCHEDULES=20000 pytest tests/runtime/engine/test_random_schedules.py --timeout 0

runs 20,000 schedules instead of a few; the seed in a failure's message repeats it. Slow tests
run 600 others.
"""

from __future__ import annotations

import os

import pytest
from fake_model import WrongKV, fake_checkpoint, fake_engine
from random_schedules import RandomSchedule

from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.schedule.queue import SCHEDULING_POLICIES

_SCHEDULES = int(os.environ.get("COPPICE_SCHEDULES", "8"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fake_checkpoint(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def alone(checkpoint):
    return RandomSchedule.alone_engine(checkpoint)


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (0, _SCHEDULES),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((8, 16), (100_000, 100_600))),
    ],
)
def test_random_schedules_give_what_each_request_gives_alone(checkpoint, alone, policy, begin, end):
    first = begin + SCHEDULING_POLICIES.index(policy)
    compared = evicted = 0
    for seed in range(first, end, len(SCHEDULING_POLICIES)):
        try:
            schedule = RandomSchedule(seed, checkpoint, policy)
            schedule.run()
            compared += schedule.compare_with_each_alone(alone)
        except (Exception, WrongKV) as error:
            error.add_note(f"RandomSchedule({seed}, checkpoint, {policy!r})")
            raise
        evicted += schedule.engine.tree.evicted_tokens
    assert compared and evicted, "the schedules were too easy"


def run(engine):
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.check()
    return outputs


def test_the_fake_model_raises_when_it_reads_other_kv(checkpoint):
    engine, model = fake_engine(checkpoint, page_size=4, kv_cache_tokens=64)
    engine.add_request("a", [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=4))
    engine.step()
    (sequence,) = engine.scheduler.running
    sequence.table[0], sequence.table[1] = sequence.table[1], sequence.table[0]
    with pytest.raises(WrongKV, match="a sequence reads other KV at position 0 of 6"):
        engine.step()
    engine, model = fake_engine(checkpoint, page_size=4, kv_cache_tokens=64)
    engine.add_request("a", [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    model.check_cache()
    (node,) = engine.tree.nodes()
    model.cache[1].v[node.pages[1], 0] = 0
    with pytest.raises(WrongKV, match="the tree names other KV"):
        model.check_cache()


def test_a_fork_may_copy_from_a_page_that_its_parent_has_given_back(checkpoint):
    """The first sequence ends in the step that forks its sibling, before the copy is made."""
    params = SamplingParams(n=2, temperature=0, max_tokens=2, ignore_eos=True)
    for limit in (1, 2):
        engine, _ = fake_engine(
            checkpoint, page_size=4, kv_cache_tokens=24, enable_prefix_caching=limit == 1
        )
        engine.add_request("a", [5, 6, 7, 8, 9, 10], params)
        outputs = engine.step()
        assert [output.index for output in outputs] == [0, 1]
        engine.abort("a", 0)
        tokens = [output.new_token_ids for output in outputs if output.index == 1]
        tokens += [output.new_token_ids for output in run(engine)["a", 1]]
        other, _ = fake_engine(checkpoint, kv_cache_tokens=256)
        other.add_request("a", [5, 6, 7, 8, 9, 10], params)
        assert tokens == [output.new_token_ids for output in run(other)["a", 1]]


def test_beams_that_do_not_fit_together_take_turns(checkpoint, monkeypatch):
    """Within a step of the search the beams run one after another; those that are done wait."""
    params = BeamSearchParams(4, 12, ignore_eos=True)
    prompt = list(range(3, 23))
    found = []
    for tokens in (16 * 17, 4096):
        engine, _ = fake_engine(checkpoint, page_size=16, kv_cache_tokens=tokens, max_num_seqs=4)
        engine.add_beam_search("a", prompt, params)
        if tokens < 4096:  # most of the pool is taken, unknown to the accounting
            monkeypatch.setattr(engine, "_check_when_idle", lambda: None)
            engine.tree.allocate(engine.num_pages - 3)
        steps = 0
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
            steps += 1
            assert steps < 500, "no progress"
        if tokens < 4096:
            assert engine.counters.preemptions > 0
        found.append([(each.new_token_ids, pytest.approx(each.score)) for each in outputs])
    assert len(found[0]) == 4 and found[0] == found[1]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_beam_computes_its_prompt_again_in_chunks(checkpoint, page_size):
    """A preempted beam whose prompt was evicted enters only what it has computed again."""
    params, prompt = BeamSearchParams(3, 6, ignore_eos=True), list(range(3, 33))
    found = []
    for disturbed in (False, True):
        engine, model = fake_engine(
            checkpoint, page_size=page_size, kv_cache_tokens=512, max_num_seqs=4,
            max_num_batched_tokens=7,
        )  # fmt: skip
        engine.add_beam_search("a", prompt, params)
        while len(engine.scheduler.running) < 3:
            assert engine.step() == []
        if disturbed:
            for sequence in list(engine.scheduler.running):
                engine.scheduler.preempt(sequence)
            engine.tree.evict(engine.num_pages)
            assert engine.tree.cached_tokens == 0
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
            engine.check()
            model.check_cache()
        found.append([(each.new_token_ids, pytest.approx(each.score)) for each in outputs])
    assert len(found[0]) == 3 and found[0] == found[1]


def test_forks_of_a_private_sequence_keep_out_of_the_tree_until_the_last_has_ended(checkpoint):
    """A request as long as the pool whose hit needs a page more than there is starts privately."""
    engine, _ = fake_engine(checkpoint, page_size=4, kv_cache_tokens=24, max_num_seqs=4)
    first = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("a", [3] * 17, first)
    run(engine)
    engine.add_request("b", [3] * 15 + [4] * 4, SamplingParams(n=2, max_tokens=5, seed=1,
                                                              ignore_eos=True))  # fmt: skip
    outputs = run(engine)
    assert {key: len(each) for key, each in outputs.items()} == {("b", 0): 5, ("b", 1): 5}
    assert engine.counters.preemptions > 0
    assert engine.tree.pool.free_pages + engine.tree.cached_pages == 6


def test_a_step_that_fails_ends_forks_whose_copy_it_was_to_make(checkpoint):
    engine, model = fake_engine(checkpoint, page_size=4, kv_cache_tokens=256, max_num_seqs=4)
    params = SamplingParams(n=3, temperature=1, seed=1, max_tokens=8, ignore_eos=True)
    engine.add_request("a", [5, 6, 7, 8, 9], params)
    engine.step()
    model.failure = "copy", RuntimeError("on purpose")
    outputs = engine.step()
    assert sorted(output.index for output in outputs) == [0, 1, 2]
    assert {output.finish_reason for output in outputs} == {"error"}
    engine.check()
    model.check_cache()
    assert not engine.has_unfinished() and not engine.scheduler.running

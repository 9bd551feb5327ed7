"""With drafts each request gets what it gets without, and what is rejected leaves no trace.

COPPICE_SCHEDULES=20000 runs that many random schedules, as in `test_random_schedules`.
"""

from __future__ import annotations

import contextlib
import os
import random

import pytest
from fake_model import VOCABULARY, WrongKV, fake_checkpoint, fake_engine
from random_schedules import RandomSchedule
from scripted_drafts import ScriptedDrafts

from coppice.radix.state import TreeListener
from coppice.runtime.engine.queued import Step
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling.drafts.draft import NOTHING, Draft, DraftToken
from coppice.runtime.schedule.queue import SCHEDULING_POLICIES

_SCHEDULES = int(os.environ.get("COPPICE_SCHEDULES", "8"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fake_checkpoint(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def alone(checkpoint):
    return RandomSchedule.alone_engine(checkpoint)


@pytest.mark.parametrize("own", [False, True], ids=["scripted", "own"])
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (0, _SCHEDULES),
        *(
            pytest.param(at, at + 300, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
            for at in range(200_000, 200_900, 300)
        ),
    ],
)
def test_random_schedules_with_drafts_give_what_each_request_gives_alone(
    checkpoint, alone, begin, end, own
):
    """With drafts that are known to be right or wrong, or those of the engine's own sources.

    Of the latter adapters, grammars, sleep and resets change what text they may find.
    """
    compared = accepted = rejected = branched = 0
    for seed in range(begin, end):
        policy = SCHEDULING_POLICIES[seed % len(SCHEDULING_POLICIES)]
        options = {"own_drafts": True} if own else {"known": alone}
        try:
            schedule = RandomSchedule(seed, checkpoint, policy, **options)
            schedule.run()
            compared += schedule.compare_with_each_alone(alone)
        except (Exception, WrongKV) as error:
            error.add_note(f"RandomSchedule({seed}, checkpoint, {policy!r}), own drafts: {own}")
            raise
        counts = schedule.engine.drafts.counts if own else schedule.drafts
        accepted += counts.accepted
        rejected += counts.drafted - counts.accepted
        branched += 0 if own else counts.branched
    assert compared and accepted and rejected, "the schedules were too easy"
    assert own or branched, "the schedules were too easy"


class Heard(TreeListener):
    """What a tree tells, as text."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def stored(self, node):
        self.log.append(f"stored {node.prefix().hex()}")

    def split(self, upper, lower):
        self.log.append(f"split {upper.prefix().hex()} {lower.prefix().hex()}")

    def evicted(self, node, length):
        self.log.append(f"evicted {node.prefix().hex()} {length}")


def state(engine, heard):
    """All that is to be as if nothing had been drafted."""
    tree, counters = engine.tree, engine.counters
    sequences = [*engine.scheduler.running, *engine.scheduler.waiting]
    return {
        "heard": heard.log,
        "nodes": sorted((each.prefix(), each.locks, each.stamp) for each in tree.nodes()),
        "pages": (tree.pool.free_pages, tree.cached_pages, tree.locked_pages, tree.evicted_tokens),
        "accounts": engine.accounts.counts(),
        "counts": [
            getattr(counters, name)
            for name in ("requests", "hit_tokens", "computed_tokens", "generated_tokens",
                         "preemptions", "evicted_tokens", "steps", "finished")
        ],
        "sequences": [
            (each.request.request_id, each.index, each.status, each.tokens.tolist(), each.computed,
             len(each.table), each.private)
            for each in sequences
        ],
    }  # fmt: skip


def some_requests(rng, count):
    stem = [rng.randrange(VOCABULARY) for _ in range(7)]
    for number in range(count):
        prompt = rng.choice([[], stem]) + [rng.randrange(VOCABULARY) for _ in range(1 + number % 5)]
        if number % 7 == 6:
            yield str(number), prompt, BeamSearchParams(2, 5, ignore_eos=True)
        else:
            yield str(number), prompt, SamplingParams(
                n=rng.choice([1, 1, 2]), temperature=rng.choice([0.0, 1.0]), seed=number,
                max_tokens=rng.choice([3, 12]), ignore_eos=True,
                frequency_penalty=rng.choice([0.0, 1.0]),
            )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_what_is_rejected_leaves_no_trace(checkpoint, seed):
    """Beside an engine without drafts, in tiny pools: the same state after each step."""
    rng = random.Random(seed)
    size = rng.choice([1, 3, 4, 16])
    options = {
        "page_size": size, "kv_cache_tokens": size * -(-rng.choice([44, 70, 200]) // size),
        "max_num_seqs": 4, "max_num_batched_tokens": rng.choice([6, 20]),
    }  # fmt: skip
    engines = [fake_engine(checkpoint, **options)[0] for _ in range(2)]
    heard = [Heard(), Heard()]
    plain, drafted = engines
    for engine, listener in zip(engines, heard, strict=True):
        engine.tree.add_listener(listener)

    def following(sequence):
        """What the other engine, one step ahead, has got."""
        (twin,) = (s for s in got if s == (sequence.request.request_id, sequence.index))
        return [got[twin]]

    drafts = ScriptedDrafts(rng, following, right=0.0)
    drafted.speculate(drafts)
    waiting = list(some_requests(rng, 12))
    got = {}
    while waiting or plain.has_unfinished():
        while waiting and rng.random() < 0.4:
            name, prompt, params = waiting.pop()
            for engine in engines:
                if not isinstance(params, BeamSearchParams):
                    engine.add_request(name, prompt, params)
                    continue
                with contextlib.suppress(ValueError):  # its beams don't fit the pool
                    engine.add_beam_search(name, prompt, params)
        outputs = plain.step()
        got = {(o.request_id, o.index): o.new_token_ids[0] for o in outputs if o.new_token_ids}
        theirs = drafted.step()
        assert [(o.request_id, o.index, o.new_token_ids, o.finish_reason) for o in outputs] == [
            (o.request_id, o.index, o.new_token_ids, o.finish_reason) for o in theirs
        ]
        assert state(drafted, heard[1]) == state(plain, heard[0])
        drafted.check()
    assert drafts.drafted and not drafts.accepted


class Fixed:
    """Proposes one draft, whenever there is room for all of it."""

    def __init__(self, tokens):
        self.draft = Draft(tuple(DraftToken(*each, 0.5, "fixed") for each in tokens))
        self.asked = []
        self.paths = []
        self.over = 0

    def skips(self, sequences):
        return False

    def propose(self, sequences, rows):
        self.asked.append([most for _, most in sequences])
        return [self.draft if most >= len(self.draft) else NOTHING for _, most in sequences]

    def verified(self, sequence, draft, path):
        self.paths.append((len(draft), list(path)))

    def stepped(self, sequences, drafted, rows, seconds):
        pass

    def ended(self, sequence):
        self.over += 1


def small(checkpoint, **options):
    return fake_engine(checkpoint, kv_cache_tokens=256, **options)


def served(engine, prompt, **params):
    engine.add_request("a", prompt, SamplingParams(temperature=0, **params))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        engine.check()
    return outputs


def test_a_draft_ends_where_the_sequence_does(checkpoint):
    """By its length, by a stop token in the middle of the draft, and with all tokens at once."""
    engine = small(checkpoint)[0]
    for first in range(3, VOCABULARY):
        prompt = [first, 6, 7]
        plain = served(engine, prompt, max_tokens=9, ignore_eos=True)
        tokens = [each.new_token_ids[0] for each in plain]
        if tokens[4] not in tokens[:4]:
            break
    chain = [(token, place - 1) for place, token in enumerate(tokens[1:7])]
    for more, count, reason in (
        ({"max_tokens": 9, "ignore_eos": True}, 9, "length"),
        ({"max_tokens": 8, "ignore_eos": True}, 8, "length"),
        ({"max_tokens": 9, "stop_token_ids": (tokens[4],), "ignore_eos": True}, 5, "stop"),
        ({"max_tokens": 9, "stop_token_ids": (tokens[4],), "min_tokens": 6}, None, None),
    ):
        expected = served(small(checkpoint)[0], prompt, **more)
        engine, model = small(checkpoint)
        engine.speculate(drafts := Fixed(chain))
        outputs = served(engine, prompt, **more)
        model.check_cache()
        found = [token for each in outputs for token in each.new_token_ids]
        assert found == [each.new_token_ids[0] for each in expected]
        if count is not None:
            assert (len(found), outputs[-1].finish_reason) == (count, reason)
            assert len(outputs) <= 3
        assert outputs[-1].finish_reason == expected[-1].finish_reason
        assert outputs[-1].stop_reason == expected[-1].stop_reason
        assert engine.counters.generated_tokens == len(found)
        assert drafts.over == 1
        cached = engine.tree.cached_tokens
        assert cached == len(prompt) + len(found) - 1  # not the last token, drafted or not


def test_only_the_likeliest_path_where_attention_takes_no_branches(checkpoint):
    engine, _ = small(checkpoint)
    engine.runner.attention.branches = False
    engine.speculate(drafts := Fixed([(1, -1), (2, -1), (3, 1), (4, 0)]))
    drafts.draft = Draft((
        DraftToken(1, -1, 0.2, ""), DraftToken(2, -1, 0.5, ""), DraftToken(3, 1, 0.1, ""),
        DraftToken(4, 1, 0.3, ""), DraftToken(5, 3, 0.3, ""),
    ))  # fmt: skip
    served(engine, [5, 6, 7], max_tokens=20, ignore_eos=True)
    assert {size for size, _ in drafts.paths} == {3}
    assert drafts.draft.likeliest().tokens[2].token == 5


def test_steps_overlap_where_nothing_is_drafted(checkpoint):
    """The tokens are waited for in few steps only, if no draft comes."""
    engine, _ = small(checkpoint, async_scheduling=True)
    drafts = Fixed([(1, -1)])
    drafts.draft = NOTHING
    engine.speculate(drafts)
    engine.add_request("a", [5, 6], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    late = 0
    while engine.has_unfinished():
        engine.step()
        late += engine._steps._before is not None
    assert 4 < len(drafts.asked) < 16 and late > 80


def test_an_interrupt_between_a_draft_and_its_tokens(checkpoint, monkeypatch):
    """The next call takes the step up again before anything else is scheduled."""
    prompt, params = [5, 6, 7], {"max_tokens": 12, "ignore_eos": True}
    plain = [t for o in served(small(checkpoint)[0], prompt, **params) for t in o.new_token_ids]
    engine, _ = small(checkpoint, async_scheduling=True)
    engine.speculate(Fixed([(token, place - 1) for place, token in enumerate(plain[1:5])]))
    engine.add_request("a", prompt, SamplingParams(temperature=0, **params))
    settle, interrupted, found = Step.settle, [], []

    def interrupt(step):
        if step.verification is not None and not interrupted:
            interrupted.append(step)
            raise KeyboardInterrupt
        return settle(step)

    monkeypatch.setattr(Step, "settle", interrupt)
    while engine.has_unfinished():
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            continue
        engine.check()
        found += [token for each in outputs for token in each.new_token_ids]
    assert interrupted and found == plain

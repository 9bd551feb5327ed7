"""Steps that are queued before the tokens of the step before have arrived, on a fake device.

The fake logs the order in which steps are queued and tokens are waited for. Results must be those
without overlap.
"""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
import torch
from fake_model import EOS, Interrupted, fake_checkpoint, fake_engine
from mixed_requests import answers, make_engine

from coppice.runtime.config import EngineConfig
from coppice.runtime.report.gather import make_report, make_stats
from coppice.runtime.requests.request import DeviceLost
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling import sampler

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class LateFetch:
    """Stands for `Fetched`, and logs when it is made and waited for."""

    log: ClassVar[list[str]] = []
    count = 0

    def __init__(self, tensors):
        self._coming = list(tensors)
        self._number = LateFetch.count
        LateFetch.count += 1
        LateFetch.log.append(f"fetch {self._number}")

    def wait(self):
        LateFetch.log.append(f"wait {self._number}")
        return self._coming


@pytest.fixture
def late_device(monkeypatch):
    monkeypatch.setattr(sampler, "Fetched", LateFetch)
    monkeypatch.setattr(LateFetch, "log", [])
    monkeypatch.setattr(LateFetch, "count", 0)
    return LateFetch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fake_checkpoint(tmp_path_factory.mktemp("fake"))


def engine_pair(checkpoint, **options):
    """The same engine without overlap and with it, the latter with graphs too."""
    options = {"kv_cache_tokens": 512, "page_size": 4, "max_num_seqs": 6} | options
    sync = fake_engine(checkpoint, async_scheduling=False, **options)
    return sync, fake_engine(checkpoint, async_scheduling=True, graphs=(1, 2, 4), **options)


def run(engine, model):
    """Outputs by request and index; pages, locks and all KV are checked after each step."""
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.check()
        model.check_cache()
        model.poison()
    return outputs


def summary(outputs):
    """What a user sees of each sequence."""
    return {
        key: (
            [token for each in found for token in each.new_token_ids],
            found[-1].finish_reason,
            found[-1].stop_reason,
            [each.error for each in found if each.error],
            [each.logprobs.top_ids.tolist() for each in found if each.logprobs is not None],
            found[0].cached_tokens,
        )
        for key, found in outputs.items()
    }


def test_a_step_is_queued_before_the_tokens_of_the_one_before_are_waited_for(
    checkpoint, late_device, monkeypatch
):
    _, (engine, model) = engine_pair(checkpoint)
    hidden_states = model.hidden_states

    def logged(*inputs):
        late_device.log.append(f"queue {model.steps}")
        return hidden_states(*inputs)

    monkeypatch.setattr(model, "hidden_states", logged)
    engine.add_request("a", [5, 6, 7, 8, 9], SamplingParams(max_tokens=4, temperature=0,
                                                           ignore_eos=True))  # fmt: skip
    seen = []
    while engine.has_unfinished():
        seen.append([token for output in engine.step() for token in output.new_token_ids])
        engine.check()
    # The last token is known to be the last: nothing is queued after it.
    assert late_device.log == [
        "queue 0", "fetch 0",
        "queue 1", "wait 0", "fetch 1",
        "queue 2", "wait 1", "fetch 2",
        "queue 3", "wait 2", "fetch 3",
        "wait 3",
    ]  # fmt: skip
    assert [len(tokens) for tokens in seen] == [0, 1, 1, 1, 1]
    assert make_stats(engine).late_rows == 0
    assert make_stats(engine).decode_steps["graph"] == 3


def test_a_sequence_that_its_token_ends_is_computed_once_too_often_and_not_counted(
    checkpoint, late_device
):
    (plain, plain_model), (engine, model) = engine_pair(checkpoint)
    ending = SamplingParams(temperature=0, max_tokens=60)
    prompts = [[number, 7, 8, 9, number + 1] for number in range(3, 27)]
    found = []
    for each, its_model in ((plain, plain_model), (engine, model)):
        for number, prompt in enumerate(prompts):
            each.add_request(str(number), prompt, ending)
        found.append(summary(run(each, its_model)))
    assert found[0] == found[1]
    stopped = sum(each[1] == "stop" for each in found[1].values())
    assert stopped > 10 and all(
        tokens[-1] == EOS for tokens, why, *_ in found[1].values() if why == "stop"
    )
    assert make_stats(plain).late_rows == 0 < make_stats(engine).late_rows == stopped
    reports = [make_report(each) for each in (plain, engine)]
    for name in ("generated_tokens", "computed_tokens", "prompt_tokens", "hit_tokens", "requests",
                 "pages_held"):  # fmt: skip
        assert getattr(reports[0], name) == getattr(reports[1], name), name
    assert make_stats(plain).itl.count == make_stats(engine).itl.count


def every_kind():
    """Requests with every option that depends on earlier tokens, by name."""
    plain = {"temperature": 0.9, "max_tokens": 9}
    return {
        "greedy": SamplingParams(temperature=0, max_tokens=9),
        "seeded": SamplingParams(**plain, seed=3, top_k=9, top_p=0.9, min_p=0.01),
        "forks": SamplingParams(**plain, seed=4, n=4),
        "penalties": SamplingParams(
            **plain, seed=5, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.3
        ),
        "bans": SamplingParams(
            **plain, seed=6, bad_words_token_ids=[[4], [5, 6], [7, 8, 9]], min_tokens=4
        ),
        "stops": SamplingParams(**plain, seed=7, stop_token_ids=list(range(20, 30))),
        "only": SamplingParams(**plain, seed=8, allowed_token_ids=[5, 9, 11], logit_bias={5: 2.0}),
        "logprobs": SamplingParams(**plain, seed=9, logprobs=3),
        "prompt": SamplingParams(**plain, seed=10, prompt_logprobs=2),
        "function": SamplingParams(**plain, seed=11, logits_processors=(alternate,)),
        "broken": SamplingParams(**plain, seed=12, logits_processors=(break_at_three,)),
        "nothing": SamplingParams(**plain, seed=13, logits_processors=(forbid_all_at_three,)),
    }  # fmt: skip


def alternate(generated, logits):
    """Even and odd tokens in turn: it must see every token before."""
    if generated:
        logits[generated[-1] % 2 :: 2] = -torch.inf
    return logits


def break_at_three(generated, logits):
    if len(generated) == 3:
        raise ArithmeticError("on purpose")
    return logits


def forbid_all_at_three(generated, logits):
    return logits - torch.inf if len(generated) == 3 else logits


@pytest.mark.parametrize("pages", [128, 12])
def test_options_that_depend_on_tokens_give_the_same_with_overlap(checkpoint, late_device, pages):
    """All kinds of request at once, alone, and with a pool so small that they are preempted."""
    (plain, plain_model), (engine, model) = engine_pair(checkpoint, kv_cache_tokens=4 * pages)
    found = []
    for each, its_model in ((plain, plain_model), (engine, model)):
        for number, (name, params) in enumerate(every_kind().items()):
            each.add_request(name, [5, 6, 7, 8, 9, 3 + number], params)
        outputs = summary(run(each, its_model))
        if pages == 12:  # hits depend on what was evicted
            outputs = {key: seen[:-1] for key, seen in outputs.items()}
        found.append(outputs)
    assert found[0] == found[1]
    errors = {key[0] for key, seen in found[1].items() if seen[3]}
    assert errors == {"broken", "nothing"}
    assert pages == 128 or make_stats(engine).preemptions > 0


def test_a_step_short_of_pages_waits_for_the_tokens_before_it_preempts(checkpoint, late_device):
    _, (engine, model) = engine_pair(checkpoint, kv_cache_tokens=40)
    preempt, late = engine.scheduler.preempt, []

    def watched(sequence):
        late.extend(each for each in engine.scheduler.running if each.late)
        preempt(sequence)

    engine.scheduler.preempt = watched
    for number in range(4):
        engine.add_request(str(number), [5, 6, 3 + number], GREEDY)
    run(engine, model)
    assert make_stats(engine).preemptions > 0 and late == []


def test_beams_are_not_overlapped_and_find_the_same(tiny_checkpoint):
    """With a real model: prefills in chunks, hits, forks and beams; all but beams overlap."""
    found = [
        answers(
            make_engine(tiny_checkpoint("llama"), device="cpu", async_scheduling=overlap),
            stem=26, tokens=5,
        )
        for overlap in (False, True)
    ]  # fmt: skip
    assert found[0] == found[1]


def test_aborts_discard_tokens_that_have_not_arrived(checkpoint, late_device):
    _, (engine, model) = engine_pair(checkpoint)
    forks = SamplingParams(temperature=0.9, seed=1, n=2, max_tokens=9, ignore_eos=True)
    engine.add_request("a", [5, 6, 7, 8, 9], GREEDY)
    engine.add_request("b", [5, 6, 7, 8, 4], forks)
    for _ in range(3):
        engine.step()
    assert engine.abort("a") and engine.abort("b", 0)
    engine.check()
    rest = run(engine, model)
    assert set(rest) == {("b", 1)}
    # Two of nine tokens were returned before.
    assert len(rest["b", 1]) == 7 and rest["b", 1][-1].finish_reason == "length"
    engine.add_request("c", [5, 6, 7, 8, 9], GREEDY)
    engine.step()
    engine.abort("c")  # only its first token has not arrived yet
    assert not engine.has_unfinished()
    engine.reset_cache()
    assert engine.tree.pool.free_pages == engine.num_pages
    engine.add_request("c", [5, 6, 7, 8, 9], GREEDY)
    (outputs,) = run(engine, model).values()
    assert len(outputs) == 8


def test_a_fetch_that_fails_ends_its_requests_and_the_engine_continues(
    checkpoint, late_device, monkeypatch
):
    _, (engine, model) = engine_pair(checkpoint)
    engine.add_request("a", [5, 6, 7, 8, 9], GREEDY)
    engine.step()
    engine.add_request("b", [9, 8, 7], GREEDY)

    def fail(self):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(LateFetch, "wait", fail)
        (output,) = engine.step()
    assert output.request_id == "a" and "the device is gone" in output.error
    engine.check()
    assert len(run(engine, model)["b", 0]) == 8
    assert make_stats(engine).failed_steps == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_fetch_that_fails_while_forks_wait_for_places(
    checkpoint, late_device, monkeypatch, overlap
):
    """The step waits for its tokens at once: a failure ends the requests in it, and no others."""
    engine, model = fake_engine(
        checkpoint, async_scheduling=overlap, kv_cache_tokens=512, page_size=4, max_num_seqs=2
    )
    forks = SamplingParams(temperature=0.9, seed=1, n=4, max_tokens=5, ignore_eos=True)
    engine.add_request("a", [5, 6, 7, 8, 9], forks)
    engine.add_request("b", [9, 8, 7], GREEDY)

    def fail(self):
        raise RuntimeError("the tokens are gone")

    with monkeypatch.context() as patch:
        patch.setattr(LateFetch, "wait", fail)
        outputs = engine.step()
        engine.check()
    ended = {(each.request_id, each.index) for each in outputs if each.error is not None}
    assert {("a", index) for index in range(4)} <= ended
    assert all("the tokens are gone" in each.error for each in outputs)
    engine.add_request("c", [5, 6, 7, 8, 9], forks)
    rest = run(engine, model)
    assert {key[1] for key in rest if key[0] == "c"} == set(range(4))
    assert engine.tree.pool.free_pages + engine.tree.cached_pages == engine.num_pages


def test_an_interrupt_while_tokens_are_waited_for_loses_none(checkpoint, late_device, monkeypatch):
    (plain, plain_model), (engine, model) = engine_pair(checkpoint, max_num_seqs=2)
    forks = SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=6, ignore_eos=True)
    for each in (plain, engine):
        each.add_request("a", [5, 6, 7, 8, 9], GREEDY)
        each.add_request("b", [5, 6, 7, 8, 4], forks)
    expected, outputs = summary(run(plain, plain_model)), {}
    wait, calls = LateFetch.wait, [0]

    def interrupted(self):
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise Interrupted
        return wait(self)

    monkeypatch.setattr(LateFetch, "wait", interrupted)
    interrupts = 0
    while engine.has_unfinished():
        try:
            for output in engine.step():
                outputs.setdefault((output.request_id, output.index), []).append(output)
        except Interrupted:
            interrupts += 1
        engine.check()
        model.check_cache()
        model.poison()
    assert interrupts > 2
    assert summary(outputs) == expected


class Broken:
    """A device that has failed for good: as with CUDA, each later call raises."""

    def __init__(self, engine, monkeypatch):
        self.failed = False
        monkeypatch.setattr(engine.runner, "fault", self.fault)

    def fail(self, *arguments):
        self.failed = True
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def fault(self):
        return "CUDA error: an illegal memory access was encountered" if self.failed else None


@pytest.mark.parametrize("where", ["wait", "forward"])
def test_a_device_that_has_failed_for_good_ends_everything(
    checkpoint, late_device, monkeypatch, where
):
    _, (engine, model) = engine_pair(checkpoint, max_num_seqs=3)
    forks = SamplingParams(temperature=0.9, seed=1, n=2, max_tokens=5, ignore_eos=True)
    engine.add_request("a", [5, 6, 7, 8, 9], GREEDY)
    engine.step()
    engine.step()
    engine.add_request("b", [5, 6, 7, 8, 4], forks)
    engine.add_request("c", [5, 6, 7, 3, 3], GREEDY)
    device = Broken(engine, monkeypatch)
    if where == "wait":
        monkeypatch.setattr(LateFetch, "wait", device.fail)
    else:
        monkeypatch.setattr(model, "hidden_states", device.fail)
    with pytest.raises(DeviceLost, match=r"process has to end: CUDA error: an illegal memory acc"):
        run(engine, model)
    assert not engine.has_unfinished()
    engine.check()
    assert make_stats(engine).finished["error"] == 3
    with pytest.raises(DeviceLost, match="illegal memory"):
        engine.step()
    with pytest.raises(DeviceLost, match="illegal memory"):
        engine.add_request("d", [5, 6], GREEDY)


def test_an_error_of_one_step_ends_only_its_requests(checkpoint, late_device, monkeypatch):
    _, (engine, model) = engine_pair(checkpoint)
    Broken(engine, monkeypatch)
    engine.add_request("a", [5, 6, 7, 8, 9], GREEDY)
    model.failure = "layer 1", torch.OutOfMemoryError("CUDA out of memory")
    (output,) = engine.step()
    assert "CUDA out of memory" in output.error
    engine.add_request("b", [5, 6, 7, 8, 9], GREEDY)
    assert len(run(engine, model)["b", 0]) == 8


def test_pages_are_freed_and_reused_as_fast_as_possible(checkpoint, late_device):
    """Short requests that diverge inside pages, more than fit in the pool.

    Each step frees pages of sequences of which the device has one more row to compute, and other
    sequences get them at once. The fake model checks which KV each row reads.
    """
    rng = random.Random(1)
    for size, pages in ((1, 40), (4, 12), (16, 5)):
        engine, model = fake_engine(
            checkpoint, async_scheduling=True, graphs=(1, 2, 3, 5), page_size=size,
            kv_cache_tokens=size * pages, max_num_seqs=5, max_num_batched_tokens=24,
        )  # fmt: skip
        for number in range(150):
            params = SamplingParams(
                temperature=0.9, seed=number, n=rng.choice([1, 1, 2]), max_tokens=rng.randint(1, 4),
                stop_token_ids=list(range(10, 20)),
            )  # fmt: skip
            prompt = [3] * rng.randrange(1, 7) + [rng.randrange(3, 40)]
            engine.add_request(str(number), prompt, params)
            while engine.num_unfinished > 6:
                for output in engine.step():
                    assert output.error is None
                engine.check()
                model.check_cache()
                model.poison()
        run(engine, model)
        assert make_stats(engine).late_rows > 50
        assert engine.tree.pool.free_pages + engine.tree.cached_pages == pages


def test_the_option_is_checked():
    with pytest.raises(ValueError, match="async_scheduling must be True, False or None, got 3"):
        EngineConfig(model="m", async_scheduling=3)

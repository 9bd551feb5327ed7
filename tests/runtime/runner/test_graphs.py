"""Graphs of decoding steps on a fake device: sizes, padding, bounds, what runs without one."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
import torch
from fake_model import FakeAttention, FakeFixedPlan, FakeRecorder, fake_checkpoint, fake_engine
from graph_requests import OUTSIDE, SAMPLED, answered
from mixed_requests import answers, make_engine
from scripted_drafts import ScriptedDrafts

from coppice.kernels.triton import plans as triton_plans
from coppice.kernels.triton.backend import INTERPRETED
from coppice.runtime.config import EngineConfig
from coppice.runtime.report.gather import make_stats
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner import graphs as graphs_module
from coppice.runtime.runner import loaded
from coppice.runtime.runner.graphs import graph_sizes, mixed_sizes

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fake_checkpoint(tmp_path_factory.mktemp("fake"))


def run(engine, model, counts):
    """Tokens by request; each of `counts` requests run together."""
    found = {}
    for count in counts:
        for number in range(count):
            engine.add_request(f"{count} {number}", [3 + number, 4, 5, 6 + number], GREEDY)
        while engine.has_unfinished():
            for output in engine.step():
                assert output.error is None, output.error
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
            engine.check()
            model.check_cache()
            model.poison()
    return found


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, *range(8, 65, 8))),
        (256, (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))),
    ],
)
def test_sizes_lie_closer_where_they_are_small(most, sizes):
    assert graph_sizes(most) == sizes


def test_steps_are_padded_to_the_next_size_and_give_the_same_tokens(checkpoint):
    options = {"kv_cache_tokens": 256, "page_size": 4, "max_num_seqs": 6}
    counts = [1, 2, 3, 4, 5, 6]
    plain, model = fake_engine(checkpoint, **options)
    expected = run(plain, model, counts)
    assert make_stats(plain).decode_steps == {} and make_stats(plain).cuda_graphs == 0
    engine, model = fake_engine(checkpoint, graphs=(1, 2, 4), **options)
    assert run(engine, model, counts) == expected
    stats = make_stats(engine)
    # Of six tokens five are decoded; five and six sequences are more than any graph has.
    assert stats.decode_steps == {"graph": 4 * 5, "too_many": 2 * 5, "too_much": 0}
    assert stats.cuda_graphs == 3


def test_a_plan_with_too_much_work_runs_without_a_graph(checkpoint, monkeypatch):
    options = {"kv_cache_tokens": 256, "page_size": 4, "max_num_seqs": 6}
    plain, model = fake_engine(checkpoint, **options)
    expected = run(plain, model, [4])
    engine, model = fake_engine(checkpoint, graphs=(4,), **options)
    monkeypatch.setattr(FakeFixedPlan, "most_pages", 9)
    assert run(engine, model, [4]) == expected
    steps = make_stats(engine).decode_steps
    # Four sequences have two pages each at first, and three later.
    assert steps["graph"] > 0 and steps["too_much"] > 0


def test_mixed_steps_have_no_graph_where_plans_are_of_decoding_steps(checkpoint):
    engine, _ = fake_engine(checkpoint, graphs=(1, 2), kv_cache_tokens=256, page_size=4)
    engine.add_request("a", [3, 4, 5], GREEDY)
    engine.step()
    engine.step()
    assert make_stats(engine).decode_steps["graph"] == 1
    engine.add_request("b", [3, 4, 7, 8, 9], GREEDY)
    engine.step()  # decodes one, prefills the other
    assert make_stats(engine).decode_steps["graph"] == 1
    engine.step()
    assert make_stats(engine).decode_steps["graph"] == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_small_mixed_steps_are_replayed_where_plans_take_them(checkpoint, monkeypatch, overlap):
    """Chunks of prompts beside sequences that decode; larger steps run kernel by kernel."""
    options = {"kv_cache_tokens": 256, "page_size": 4, "max_num_seqs": 6}
    options |= {"max_num_batched_tokens": 9, "async_scheduling": overlap}

    def answer(engine, model):
        found = {}
        for number in range(5):
            engine.add_request(str(number), [3 + number, *range(4, 7 + 3 * number)], GREEDY)
            for _ in range(2):
                for output in engine.step():
                    assert output.error is None, output.error
                    found.setdefault(output.request_id, []).extend(output.new_token_ids)
                engine.check()
                model.check_cache()
        while engine.has_unfinished():
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
            model.check_cache()
        return found

    expected = answer(*fake_engine(checkpoint, **options))
    monkeypatch.setattr(FakeAttention, "mixed_plans", True)
    engine, model = fake_engine(checkpoint, graphs=(1, 2, 4, 6), **options)
    assert answer(engine, model) == expected
    mixed = make_stats(engine).mixed_steps
    assert mixed["graph"] > 2 and mixed["eager"] > 0
    assert engine.runner.graphs.steps["graph"] > 3


def checked(checkpoint, **options):
    """An engine, and what checks its cache after a step."""
    engine, model = fake_engine(checkpoint, **options)

    def check():
        model.check_cache()
        model.poison()

    return engine, check


@pytest.mark.parametrize(
    ("others", "mixed", "overlap"),
    [
        (None, False, False),
        (None, True, False),
        (None, False, True),
        *((each, True, True) for each in (None, *OUTSIDE)),
    ],
)
def test_tokens_are_chosen_in_graphs_as_outside(checkpoint, monkeypatch, others, mixed, overlap):
    """And outside where a row needs more than its logits and columns: until that request ends."""
    asked = list(SAMPLED)
    if others is not None:
        asked.insert(1, OUTSIDE[others])
    options = {"kv_cache_tokens": 512, "page_size": 4, "max_num_seqs": 8}
    options |= {"async_scheduling": overlap}
    monkeypatch.setattr(FakeFixedPlan, "most_pages", 100)
    expected = answered(fake_engine(checkpoint, **options)[0], asked)
    monkeypatch.setattr(FakeAttention, "mixed_plans", mixed)
    engine, check = checked(checkpoint, graphs=(1, 2, 4, 8, 32), **options)
    assert answered(engine, asked, check) == expected
    graphs = engine.runner.graphs
    replayed = graphs.steps["graph"] + graphs.mixed["graph"]
    assert graphs.chosen > 3 and (graphs.mixed["graph"] > 3) == mixed
    if others is None:
        assert graphs.chosen == replayed
    else:
        assert graphs.chosen < replayed


def test_tokens_of_drafts_are_chosen_in_graphs(checkpoint, monkeypatch):
    """Those that were drafted, in one replay with the last tokens of all sequences."""
    asked, options = [GREEDY, *SAMPLED], {"kv_cache_tokens": 512, "page_size": 4}
    monkeypatch.setattr(FakeFixedPlan, "most_pages", 100)

    expected = answered(fake_engine(checkpoint, **options)[0], asked)

    def following(sequence):
        tokens, _ = expected[sequence.request.request_id, sequence.index]
        return tokens[sequence.num_generated :]

    engine, check = checked(checkpoint, graphs=(4, 16, 64), **options)
    engine.speculate(drafts := ScriptedDrafts(random.Random(2), following))
    verified = []

    def chosen(batch, *others):
        made = usual(batch, *others)
        if batch.drafts and made is not None:
            verified.append(made.tokens is not None)
        return made

    usual = engine.runner.graphs.run
    monkeypatch.setattr(engine.runner.graphs, "run", chosen)
    assert answered(engine, asked, check) == expected
    assert drafts.accepted > 8 and len(verified) > 5 and all(verified)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="with a GPU test_graph_steps.py does this")
def test_the_kernels_choose_by_columns_that_are_in_place(checkpoint, monkeypatch):
    """Triton's, interpreted: every launch of a graph, whatever the rows of a step ask for."""
    from coppice.kernels.sampling.choose_triton import choose_rows

    options = {"kv_cache_tokens": 256, "page_size": 4, "max_num_seqs": 4}
    asked = [SAMPLED[1], SAMPLED[4]]
    expected = answered(fake_engine(checkpoint, **options)[0], asked)
    monkeypatch.setattr(loaded, "choose_by", choose_rows)
    engine, check = checked(checkpoint, graphs=(1, 2), **options)
    assert answered(engine, asked, check) == expected
    assert engine.runner.graphs.chosen > 5


def test_rows_that_a_graph_has_no_logits_for_get_them_outside(checkpoint, monkeypatch):
    """A mixed step with more sequences at their ends than any decoding step has."""
    monkeypatch.setattr(FakeAttention, "mixed_plans", True)
    options = {"kv_cache_tokens": 256, "page_size": 4, "max_num_seqs": 6}
    plain, model = fake_engine(checkpoint, **options)
    expected = run(plain, model, [5])
    engine, model = fake_engine(checkpoint, **options)
    engine.runner.capture(FakeRecorder(), (2, 32), 2)
    assert run(engine, model, [5]) == expected
    assert engine.runner.graphs.mixed["graph"] == 1


def test_a_graphs_tokens_outlast_the_next_replay(checkpoint):
    """So a step that is interrupted after its replay can be made again."""
    options = {"kv_cache_tokens": 256, "page_size": 4}
    engine, _ = fake_engine(checkpoint, graphs=(1,), async_scheduling=True, **options)
    engine.add_request("a", [3, 4, 5], GREEDY)
    engine.step()
    engine.step()
    late = engine._steps._before.late.tokens
    before = late.clone()
    graph = engine.runner.graphs._graphs[1][0]
    with torch.inference_mode():
        graph.results[-1].fill_(7)
    assert torch.equal(late, before)


def test_prompt_logprobs_come_from_a_graph_too(checkpoint, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    found = []
    for graphs in (None, (8,)):
        monkeypatch.setattr(FakeAttention, "mixed_plans", graphs is not None)
        engine, _ = fake_engine(checkpoint, graphs=graphs, kv_cache_tokens=256, page_size=4)
        engine.add_request("a", [3, 4, 5, 6, 7], params)
        found.append([])
        while engine.has_unfinished():
            found[-1] += [(each.new_token_ids, str(each.prompt_logprobs)) for each in engine.step()]
    assert found[0] == found[1]
    assert make_stats(engine).mixed_steps == {"graph": 1, "eager": 0}


@pytest.mark.parametrize(
    ("seqs", "tokens", "sizes"),
    [(256, 8192, (512, 1024)), (64, 1024, (128, 256, 512, 1024)), (6, 20, (12,)), (64, 64, ())],
)
def test_sizes_of_mixed_steps_lie_above_those_of_decoding(seqs, tokens, sizes):
    assert mixed_sizes(seqs, tokens) == sizes


def test_one_pool_and_the_largest_first(checkpoint, caplog):
    with caplog.at_level(logging.INFO, logger="coppice.runtime"):
        engine, _ = fake_engine(checkpoint, graphs=(2, 1, 4), kv_cache_tokens=256)
    graphs = engine.runner.graphs
    assert graphs.sizes == [1, 2, 4]
    summary = "3 CUDA graphs for steps of 1, 2, 4 rows took"
    assert summary in caplog.text and summary in engine.runner.memory
    assert (make_stats(engine).cuda_graph_bytes, graphs.bytes) == (30, 30)


def test_capturing_is_bounded_in_memory_and_time(checkpoint, caplog, monkeypatch):
    recorder = FakeRecorder()
    recorder.each = 300
    engine, _ = fake_engine(checkpoint, kv_cache_tokens=256)
    engine.runner.capture(recorder, (1, 2, 4, 6), 6)
    assert engine.runner.graphs.sizes == [4, 6]  # more than half of 1000 bytes are used
    assert "no CUDA graphs for fewer than 4 rows" in caplog.text
    times = iter(range(0, 1000, 25))
    clock = SimpleNamespace(monotonic=lambda: float(next(times)))
    monkeypatch.setattr(graphs_module, "time", clock)
    engine.runner.capture(FakeRecorder(), (1, 2, 4, 6), 6)
    assert engine.runner.graphs.sizes == [4, 6]  # a third one would take the 75th second


def test_ranks_capture_the_same_sizes(checkpoint, monkeypatch):
    """One that went on would wait in a sum for the others."""
    engine, _ = fake_engine(checkpoint, kv_cache_tokens=256)
    told = []

    def least(number):
        told.append(number)
        return min(number, int(len(told) < 3))  # another rank has no more room then

    monkeypatch.setattr(engine.runner.group, "least", least)
    engine.runner.capture(FakeRecorder(), (1, 2, 4, 6), 6)
    assert engine.runner.graphs.sizes == [4, 6]
    assert told == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"cuda_graph_sizes": (1, 9)}, r"from 1 to max_num_seqs \(8\), or None, got \(1, 9\)"),
        ({"cuda_graph_sizes": (0,)}, "cuda_graph_sizes must be a tuple of integers"),
        ({"cuda_graph_sizes": ()}, "cuda_graph_sizes must be a tuple of integers"),
        ({"cuda_graph_sizes": (2, 2)}, "cuda_graph_sizes must differ from each other"),
        (
            {"cuda_graph_sizes": (2,), "enforce_eager": True},
            "cuda_graph_sizes must be None with enforce_eager",
        ),
        ({"enforce_eager": 1}, "enforce_eager must be True or False, got 1"),
    ],
)
def test_options_are_checked(options, refusal):
    with pytest.raises(ValueError, match=refusal):
        EngineConfig(model="m", max_num_seqs=8, **options)


def test_graphs_where_there_can_be_none_are_refused(tiny_checkpoint):
    with pytest.raises(ValueError, match=r"cuda_graph_sizes is \(2,\); with the cpu attention"):
        make_engine(tiny_checkpoint("llama"), device="cpu", cuda_graph_sizes=(2,))


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="with a GPU test_cuda_engine.py does this")
def test_the_triton_backend_replays_forks_beams_and_trees(tiny_checkpoint, monkeypatch):
    """A real model: its kernels are launched with one grid for all steps of a size."""
    monkeypatch.setattr(triton_plans, "_WAVES", 0)  # each empty program takes the interpreter time
    path, found = tiny_checkpoint("llama"), []
    for sizes in (None, (1, 4, 6)):
        engine = make_engine(path, device="cpu", attention_backend="triton", page_size=4)
        if sizes is not None:
            engine.runner.capture(FakeRecorder(), sizes, 8)
        found.append(answers(engine, stem=9, tokens=3))
    assert make_stats(engine).decode_steps["graph"] > 5
    scores = found[0].pop("scores")
    assert found[1].pop("scores") == pytest.approx(scores, abs=1e-4)
    assert found[1] == found[0]

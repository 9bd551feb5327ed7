"""What test_graphs.py shows on a fake device, with a real model, kernels and graphs of a GPU.

Without a GPU kernels are interpreted, and a replay runs them again. That takes minutes, so only
some of the cases run then.
"""

from __future__ import annotations

import random

import pytest
import torch
from fake_model import FakeRecorder
from graph_requests import OUTSIDE, SAMPLED, answered
from mixed_requests import make_engine
from scripted_drafts import ScriptedDrafts

from coppice.kernels.sampling.choose_triton import choose_rows
from coppice.kernels.triton import plans as triton_plans
from coppice.kernels.triton.base import INTERPRETED
from coppice.runtime.report.gather import make_stats
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner import loaded, page_tables
from coppice.runtime.runner.graphs import CudaRecorder

GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.skipif(not GPU and not INTERPRETED, reason="needs a GPU, or the interpreter"),
    *([] if GPU else [pytest.mark.slow]),
]
COMPILED = pytest.mark.skipif(not GPU, reason="takes minutes where kernels are interpreted")
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Where kernels are interpreted empty programs take time."""
    if not GPU:
        monkeypatch.setattr(triton_plans, "_WAVES", 0)


@pytest.fixture
def engine_of(tiny_checkpoint):
    """Makes engines with graphs of some sizes, or without."""

    def make(sizes=None, most=8, **options):
        options = {"page_size": 4, "max_num_batched_tokens": 64} | options
        engine = make_engine(
            tiny_checkpoint("llama"), device="cuda" if GPU else "cpu", dtype="float32",
            attention_backend="triton", enforce_eager=True, **options,
        )  # fmt: skip
        if sizes is not None:
            engine.runner.capture(recorder(engine), sizes, most)
        return engine

    return make


def recorder(engine):
    return CudaRecorder(engine.runner.device) if GPU else FakeRecorder()


def served(engine, counts, tokens=4):
    """Tokens by request; each of `counts` requests of 4 prompt tokens run together."""
    found = {}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for count in counts:
        for number in range(count):
            engine.add_request(f"{count} {number}", [3 + number, 4, 5, 6 + number], params)
        while engine.has_unfinished():
            for output in engine.step():
                assert output.error is None, output.error
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
            engine.check()
    return found


@COMPILED
def test_steps_are_padded_to_the_next_size_and_give_the_same_tokens(engine_of):
    counts = [1, 3, 6]
    expected = served(engine_of(), counts)
    engine = engine_of((1, 2, 4), most=4)
    assert served(engine, counts) == expected
    stats = make_stats(engine)
    # Of four tokens three are decoded; six sequences are more than any graph has.
    assert stats.decode_steps == {"graph": 2 * 3, "too_many": 3, "too_much": 0}
    assert stats.cuda_graphs == 3


def test_a_plan_with_too_much_work_runs_without_a_graph(engine_of, monkeypatch):
    expected = served(engine_of(), [4], 6)
    # Room on the device for four page tables of two pages, beside the one that pads.
    monkeypatch.setattr(page_tables, "_LEAST", 2)
    monkeypatch.setattr(page_tables, "MOST_ENTRIES", 1 + 4 * 2)
    engine = engine_of((4,))
    assert served(engine, [4], 6) == expected
    steps = make_stats(engine).decode_steps
    # Four sequences have two pages each at first, and three later.
    assert steps["graph"] > 0 and steps["too_much"] > 0


@COMPILED
@pytest.mark.parametrize("overlap", [False, True])
def test_small_mixed_steps_are_replayed_where_plans_take_them(engine_of, overlap):
    """Chunks of prompts beside sequences that decode; larger steps run kernel by kernel."""

    def answer(engine):
        found = {}
        for number in range(4):
            engine.add_request(str(number), [3 + number, *range(4, 7 + 4 * number)], GREEDY)
            for _ in range(2):
                for output in engine.step():
                    found.setdefault(output.request_id, []).extend(output.new_token_ids)
                engine.check()
        while engine.has_unfinished():
            for output in engine.step():
                assert output.error is None, output.error
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
        return found

    options = {"max_num_batched_tokens": 12, "async_scheduling": overlap}
    expected = answer(engine_of(**options))
    engine = engine_of((1, 2, 4, 8), **options)
    assert answer(engine) == expected
    mixed = make_stats(engine).mixed_steps
    assert mixed["graph"] > 1 and mixed["eager"] > 0


@pytest.mark.parametrize(
    ("others", "overlap"),
    [
        (None, True),
        pytest.param(None, False, marks=COMPILED),
        *(pytest.param(each, True, marks=COMPILED) for each in OUTSIDE),
    ],
)
def test_tokens_are_chosen_in_graphs_as_outside(engine_of, monkeypatch, others, overlap):
    asked = list(SAMPLED)
    if others is not None:
        asked.insert(1, OUTSIDE[others])
    expected = answered(engine_of(async_scheduling=overlap), asked)
    if not GPU:  # as on a GPU
        monkeypatch.setattr(loaded, "choose_by", choose_rows)
    engine = engine_of((2, 4, 8, 32), async_scheduling=overlap)
    assert answered(engine, asked) == expected
    graphs = engine.runner.graphs
    replayed = graphs.steps["graph"] + graphs.mixed["graph"]
    assert graphs.chosen > 3 and (graphs.chosen == replayed) == (others is None)


@COMPILED
def test_tokens_of_drafts_are_chosen_in_graphs(engine_of):
    asked = [GREEDY, *SAMPLED[:3]]
    expected = answered(engine_of(), asked)

    def following(sequence):
        tokens, _ = expected[sequence.request.request_id, sequence.index]
        return tokens[sequence.num_generated :]

    engine = engine_of((4, 64))
    engine.speculate(drafts := ScriptedDrafts(random.Random(2), following, vocabulary=320))
    assert answered(engine, asked) == expected
    graphs = engine.runner.graphs
    assert drafts.accepted > 3
    assert graphs.chosen == graphs.steps["graph"] + graphs.mixed["graph"] > 2


@COMPILED
def test_rows_that_a_graph_has_no_logits_for_get_them_outside(engine_of):
    expected = served(engine_of(), [5])
    engine = engine_of((2, 32), most=2)
    assert served(engine, [5]) == expected
    assert engine.runner.graphs.mixed["graph"] == 1


def test_prompt_logprobs_come_from_a_graph_too(engine_of):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    found, tokens = [], []
    for sizes in (None, (8,)):
        engine = engine_of(sizes)
        engine.add_request("a", [3, 4, 5, 6, 7], params)
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        tokens.append([each.new_token_ids for each in outputs])
        (scored,) = [each.prompt_logprobs for each in outputs if each.prompt_logprobs is not None]
        found.append(scored.logprobs[1:])
    assert tokens[0] == tokens[1]
    assert found[1] == pytest.approx(found[0], abs=1e-3)
    assert make_stats(engine).mixed_steps == {"graph": 1, "eager": 0}


def test_a_graphs_tokens_outlast_the_next_replay(engine_of):
    engine = engine_of((1,), async_scheduling=True)
    engine.add_request("a", [3, 4, 5], GREEDY)
    engine.step()
    engine.step()
    late = engine._steps._before.late.tokens
    before = late.tolist()
    with torch.inference_mode():
        engine.runner.graphs._graphs[1][0].results[-1].fill_(7)
    assert late.tolist() == before


def test_capturing_is_bounded_in_memory(engine_of):
    """After two graphs more than half of what was free seems to be taken."""
    engine = engine_of()

    class Small:
        def __init__(self):
            self.real, self.free = recorder(engine), 1000

        def record(self, run):
            self.free -= 300
            return self.real.record(run)

        def free_bytes(self):
            return self.free

    engine.runner.capture(Small(), (1, 2, 4, 6), 6)
    assert engine.runner.graphs.sizes == [4, 6]
    assert served(engine, [1, 4]) == served(engine_of(), [1, 4])

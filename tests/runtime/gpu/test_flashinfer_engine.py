"""The whole engine with the FlashInfer backend, over a fake of FlashInfer that needs no GPU."""

from __future__ import annotations

import random
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from fake_flashinfer import Library, share_all
from fake_model import FakeRecorder
from mixed_requests import answers, greedy, make_engine, make_prompts
from near_ties import greedy_texts, same_but_for_near_ties
from scripted_drafts import ScriptedDrafts

from coppice.kernels.flashinfer import backend as flashinfer_backend
from coppice.kernels.flashinfer.fixed import FlashInferFixedPlan
from coppice.kernels.flashinfer.levels import build_levels
from coppice.kernels.sampling.choose import choose
from coppice.kernels.sampling.columns import TOP_K, UNIFORM
from coppice.kernels.triton import plans as triton_plans
from coppice.kernels.triton.base import INTERPRETED
from coppice.runtime.report.gather import make_stats
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling import sampler

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="with a GPU test_cuda_engine.py does this, with FlashInfer itself"
)

STEM, TOKENS = 20, 3
OPTIONS = {"device": "cpu", "dtype": "float16"}
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture
def library(monkeypatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    return made


class Draws:
    """Every token that an engine draws at random, by the number in [0, 1) that chose it.

    In float16 two backends' logits differ by some 0.01, and the places where one token's share of
    [0, 1) ends and the next begins by some 0.001. A number that falls that near to such a place may
    choose either of the two tokens, and the rest of that line is another text then.
    """

    def __init__(self, monkeypatch) -> None:
        self.made: dict[float, tuple[torch.Tensor, np.ndarray, int]] = {}
        monkeypatch.setattr(sampler, "choose", self._choose)

    def _choose(self, logits: torch.Tensor, columns: np.ndarray) -> torch.Tensor:
        tokens = choose(logits, columns)
        for row in np.flatnonzero(columns[:, TOP_K] != 1):
            asked = columns[row : row + 1]
            self.made[asked[0, UNIFORM]] = logits[row : row + 1].clone(), asked, int(tokens[row])
        return tokens

    def check(self, other: Draws) -> None:
        """From like logits come like tokens; logits differ only where an earlier token does."""
        assert self.made.keys() == other.made.keys()
        apart = followers = 0
        for uniform, (logits, columns, token) in self.made.items():
            theirs, _, their_token = other.made[uniform]
            if not torch.allclose(logits, theirs, rtol=0, atol=0.05):
                followers += 1
            elif token != their_token:
                moved = np.repeat(columns, 2, axis=0)
                moved[:, UNIFORM] += -0.002, 0.002
                assert their_token in choose(logits.repeat(2, 1), moved).tolist()
                apart += 1
        assert apart <= len(self.made) // 5
        assert followers <= apart * (TOKENS - 1)


@pytest.mark.slow
def test_every_kind_of_request_gets_the_reference_backends_tokens(
    tiny_checkpoint, library, monkeypatch
):
    """Prefills in chunks, hits, forks and beams, with everything shared that can be."""
    share_all(monkeypatch)
    schedules = []

    def build(*given):
        schedules.append(build_levels(*given))
        return schedules[-1]

    monkeypatch.setattr(flashinfer_backend, "build_levels", build)
    path = tiny_checkpoint("qwen3", head_dim=64)
    found, draws, sampled = {}, {}, {}
    for backend in ("reference", "flashinfer"):
        draws[backend] = Draws(monkeypatch)
        engine = make_engine(path, attention_backend=backend, page_size=4, **OPTIONS)
        found[backend] = answers(engine, stem=STEM, tokens=TOKENS)
        sampled[backend] = found[backend].pop("sampled")
    scores = found["reference"].pop("scores")
    assert found["flashinfer"].pop("scores") == pytest.approx(scores, abs=0.05)
    assert found["flashinfer"] == found["reference"]
    assert sampled["flashinfer"].keys() == sampled["reference"].keys()
    assert len(draws["reference"].made) == len(sampled["reference"]) * TOKENS
    draws["reference"].check(draws["flashinfer"])
    assert found["flashinfer"]["warm"] == found["flashinfer"]["cold"]
    shared = [
        plan for plan in library.plans if not plan.causal and (plan.query_indptr.diff() > 1).any()
    ]
    assert len(shared) > 10
    assert {plan.causal for plan in library.plans} == {False, True}
    assert {(plan.q, plan.kv, plan.sm_scale) for plan in library.plans} == {
        (torch.float16, torch.float16, 64**-0.5)
    }


def test_a_step_plans_once_for_all_layers(tiny_checkpoint, library):
    path = tiny_checkpoint("llama", head_dim=64, num_hidden_layers=5)
    engine = make_engine(path, attention_backend="flashinfer", **OPTIONS)
    before = len(library.plans)  # of the trial at the start
    engine.add_request("0", [5, 6, 7, 8], PARAMS)
    steps = 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
    assert len(library.plans) - before == steps == 3


def test_a_model_without_kernels_is_refused_by_name(tiny_checkpoint, library):
    with pytest.raises(ValueError, match=r"head_dim is 16; attention_backend 'flashinfer' has"):
        make_engine(tiny_checkpoint("llama"), attention_backend="flashinfer", **OPTIONS)
    path = tiny_checkpoint("mistral", head_dim=64, sliding_window=9)
    library.compiled = lambda case: not case.windowed
    with pytest.raises(ValueError, match=r"does not cover .* sliding_window 9 and logit_softcap"):
        make_engine(path, attention_backend="flashinfer", **OPTIONS)
    options = OPTIONS | {"dtype": "float32"}
    with pytest.raises(ValueError, match=r"dtype is torch.float32; .* takes torch.bfloat16"):
        make_engine(path, attention_backend="flashinfer", **options)


@pytest.mark.slow
def test_graphs_replay_with_shared_levels_and_without(tiny_checkpoint, library, monkeypatch):
    """Every size has a graph without shared levels and one with some; both are taken."""
    share_all(monkeypatch)
    path, found = tiny_checkpoint("llama", head_dim=64, num_hidden_layers=1), []
    loaded = Counter()
    load = FlashInferFixedPlan.load

    def counted(plan, step, outbox=None):
        fits = load(plan, step, outbox)
        loaded[plan.levels] += fits
        return fits

    monkeypatch.setattr(FlashInferFixedPlan, "load", counted)
    for sizes in (None, (3, 4)):
        engine = make_engine(path, attention_backend="flashinfer", page_size=4, **OPTIONS)
        if sizes is not None:
            engine.runner.capture(FakeRecorder(), sizes, 8)
            loaded.clear()
        together = greedy(engine, make_prompts(9), TOKENS)
        assert loaded[2] == (0 if sizes is None else TOKENS - 1)
        found.append(together + greedy(engine, [[5, 6, 7], [8, 9, 10, 11]], TOKENS))
        assert loaded[0] == loaded[2]
    steps = make_stats(engine).decode_steps
    assert steps == {"graph": 2 * (TOKENS - 1), "too_many": 0, "too_much": 0}
    assert found[1] == found[0]


@pytest.mark.slow
def test_small_steps_with_prompts_are_replayed_by_our_kernels(
    tiny_checkpoint, library, monkeypatch
):
    """FlashInfer's plans of graphs take one row of each sequence."""
    monkeypatch.setattr(triton_plans, "_WAVES", 0)  # where kernels are interpreted, for speed
    path, found = tiny_checkpoint("llama", head_dim=64, num_hidden_layers=1), []
    for sizes in (None, (2, 8, 16)):
        engine = make_engine(path, attention_backend="flashinfer", page_size=4, **OPTIONS)
        if sizes is not None:
            engine.runner.capture(FakeRecorder(), sizes, 2)
        tokens = {}
        for number in range(3):
            prompt = [3 + number, *range(4, 7 + 4 * number)]
            engine.add_request(str(number), prompt, PARAMS)
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        while engine.has_unfinished():
            for output in engine.step():
                assert output.error is None, output.error
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        found.append(tokens)
    assert found[1] == found[0]
    assert make_stats(engine).mixed_steps == {"graph": 3, "eager": 0}
    assert make_stats(engine).decode_steps["too_much"] == 0


@pytest.mark.slow
def test_drafts_change_no_token(tiny_checkpoint, library):
    """Steps with branches run by our kernels, the others by FlashInfer's."""
    path = tiny_checkpoint("llama", head_dim=64)
    prompts = [[3 + number, *range(4, 12 + 5 * number)] for number in range(6)]
    found, drafts = [], None
    for speculates in (False, True):
        engine = make_engine(path, attention_backend="flashinfer", page_size=4, **OPTIONS)
        if speculates:

            def following(each, known=found[0]):
                return known[int(each.request.request_id)].tokens[each.num_generated :]

            drafts = ScriptedDrafts(random.Random(3), following, vocabulary=320)
            engine.speculate(drafts)
        found.append(greedy_texts(engine, prompts, 24))
    equal = same_but_for_near_ties(found[0], [text.tokens for text in found[1]], 0.05)
    assert equal >= len(prompts) // 2
    assert drafts.accepted > 20
    assert drafts.drafted > drafts.accepted
    assert drafts.branched > 5

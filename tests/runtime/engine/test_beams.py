"""Beam search in the engine: results of transformers, beside other requests and from few pages."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from reference_engine import reference_engine
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams

PROMPTS = ([5, 9, 33, 7, 12, 81, 44, 3, 3, 17, 60], [5, 9, 33, 7, 12, 81, 2, 8], [1])
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


make = partial(reference_engine, max_num_seqs=16)


def run(engine):
    """Outputs by request; every page and lock is recounted after each step."""
    results = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            results.setdefault(output.request_id, []).append(output)
        engine.check()
    assert make_report(engine).pages_held == 0
    return results


@torch.inference_mode()
def theirs(path, prompt, params, eos, **options):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    one = params.beam_width == 1  # transformers gives no scores then
    scores = [0.0] if one else out.sequences_scores.tolist()
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), scores, strict=True):
        end = row.index(eos) + 1 if eos in row else params.max_tokens
        found.append((row[:end], pytest.approx(score, abs=1e-4)))
    return found


@pytest.fixture(scope="module")
def eos(tiny_checkpoint):
    """A token that ends some beams of the first prompt before max_tokens."""
    engine = make(tiny_checkpoint("llama"))
    engine.add_request("a", PROMPTS[0], GREEDY)
    (outputs,) = run(engine).values()
    return outputs[4].new_token_ids[0]


@pytest.mark.pairwise
@pytest.mark.model("beams")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("search", [(2, 1.0, False), (4, 0.5, True), (8, 2.0, "never")], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"page_size": 4}, id="roomy"),
        pytest.param({"page_size": 1, "max_num_batched_tokens": 16}, id="chunks"),
        pytest.param({"page_size": 4, "kv_cache_tokens": None}, id="tiny-pool"),
        pytest.param({"page_size": 16, "enable_prefix_caching": False}, id="no-cache"),
    ],
)
def test_sequences_and_scores_are_those_of_transformers(
    tiny_checkpoint, family, search, options, eos
):
    path = tiny_checkpoint(family)
    width, length_penalty, early_stopping = search
    params = BeamSearchParams(
        width, 9, length_penalty=length_penalty, early_stopping=early_stopping,
        stop_token_ids=(eos,), ignore_eos=True,
    )  # fmt: skip
    expected = [theirs(path, prompt, params, eos) for prompt in PROMPTS]
    if "kv_cache_tokens" in options:
        pages = -(-(max(map(len, PROMPTS)) + 9) // 4) + width * 5
        options = options | {"kv_cache_tokens": 4 * pages}
    engine = make(path, **options)
    for number, prompt in enumerate(PROMPTS):
        engine.add_beam_search(f"beams {number}", prompt, params)
        engine.add_request(f"plain {number}", prompt, GREEDY)
    results = run(engine)
    for number in range(len(PROMPTS)):
        outputs = results[f"beams {number}"]
        assert [output.index for output in outputs] == list(range(width))
        found = [(list(output.new_token_ids), output.score) for output in outputs]
        assert found == expected[number]


def test_beams_share_pages_and_prompt_and_winners_stay_cached(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"), page_size=4)
    params = BeamSearchParams(4, 8, n=2, ignore_eos=True)
    engine.add_beam_search("a", PROMPTS[0], params)
    most = 0
    while engine.has_unfinished():
        outputs = engine.step()
        engine.check()
        report = make_report(engine)
        most = max(most, report.pages_held)
    separate = 4 * -(-(len(PROMPTS[0]) + 8) // 4)
    assert most < separate, "no more than separate sequences would take"
    assert len(outputs) == 2
    for output in outputs:
        tokens = [*PROMPTS[0], *output.new_token_ids]
        assert engine.tree.match(tokens, engine.intake.namespace(None)).length == len(tokens) - 1


class Doubled(LogitsProcessor):
    """Applies `doubled` to each row, as a logits processor of transformers."""

    def __init__(self, prompt):
        self.prompt = prompt

    def __call__(self, input_ids, scores):
        rows = [doubled(ids[self.prompt :].tolist(), row) for ids, row in zip(input_ids, scores)]  # noqa: B905
        return torch.stack(rows)


def doubled(generated, scores):
    scores = scores.clone()
    scores[sum(generated) % 7 :: 7] *= 2
    return scores


ALLOWED = tuple(range(3, 320, 2))
RULES = {
    "repetition": ({"repetition_penalty": 4.0}, {"repetition_penalty": 4.0}),
    "less than one": ({"repetition_penalty": 0.3}, {"repetition_penalty": 0.3}),
    "allowed": (
        {"allowed_token_ids": ALLOWED},
        {"prefix_allowed_tokens_fn": lambda batch, ids: list(ALLOWED)},
    ),
    "bias": (
        {"logit_bias": {7: 6.5, 111: -3.0}},
        {"sequence_bias": [[[7], 6.5], [[111], -3.0]]},
    ),
    "min_tokens": ({"min_tokens": 6}, {"min_new_tokens": 6}),
    "function": ({"logits_processors": [doubled]}, None),
}


@pytest.mark.parametrize("name", [*RULES, "bad words", "all"])
@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_rules_act_as_those_of_transformers(tiny_checkpoint, eos, name, width):
    path = tiny_checkpoint("llama")
    prompt = PROMPTS[0] if name == "min_tokens" else [56, 91, *range(101, 320, 3), *PROMPTS[0]]
    if name in RULES:
        ours, their = RULES[name]
    else:  # pieces of what is found without bad words
        engine = make(path)
        engine.add_beam_search("a", prompt, BeamSearchParams(4, 9, ignore_eos=True))
        (outputs,) = run(engine).values()
        found = [list(output.new_token_ids) for output in outputs]
        words = [found[0][2:4], found[1][:1], [prompt[-1], found[2][0]], found[3][1:5]]
        ours, their = {"bad_words_token_ids": words}, {"bad_words_ids": words}
        if name == "all":
            ours, their = ours | {"repetition_penalty": 1.3}, their | {"repetition_penalty": 1.3}
    if their is None:
        their = {"logits_processor": LogitsProcessorList([Doubled(len(prompt))])}
    params = BeamSearchParams(width, 9, stop_token_ids=(eos,), ignore_eos=True, **ours)
    expected = theirs(path, prompt, params, eos, **their)
    plain = theirs(path, prompt, params, eos)
    engine = make(path, page_size=4)
    engine.add_beam_search("a", prompt, params)
    engine.add_request("b", prompt, GREEDY)
    outputs = run(engine)["a"]
    assert [list(output.new_token_ids) for output in outputs] == [tokens for tokens, _ in expected]
    assert [tokens for tokens, _ in expected] != [tokens for tokens, _ in plain], "it must matter"
    if width > 1:
        assert [output.score for output in outputs] == [score for _, score in expected]
    else:
        engine.add_request("greedy", prompt, replace(params.sampling, n=1))
        greedy = [token for output in run(engine)["greedy"] for token in output.new_token_ids]
        assert greedy == list(outputs[0].new_token_ids)


@torch.inference_mode()
def test_penalties_are_counted_for_each_line_by_itself(tiny_checkpoint):
    """Against a search that computes every line anew, and applies the parameters by itself."""
    path, prompt = tiny_checkpoint("qwen2"), PROMPTS[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    params = BeamSearchParams(
        4, 8, ignore_eos=True, frequency_penalty=0.9, presence_penalty=0.6, temperature=1.3
    )
    beams = [((), 0.0)]
    for _ in range(8):
        found = []
        for tokens, total in beams:
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            scores = (logits / 1.3).log_softmax(-1)
            for token in set(tokens):
                scores[token] -= 0.9 * tokens.count(token) + 0.6
            found += [((*tokens, token), total + float(scores[token])) for token in range(320)]
        beams = sorted(found, key=lambda each: -each[1])[:4]
    for options in ({}, {"page_size": 4, "kv_cache_tokens": 4 * 40}):
        engine = make(path, **options)
        engine.add_beam_search("a", prompt, params)
        for number in range(3):
            engine.add_beam_search(f"other {number}", [number, *prompt], params)
        outputs = run(engine)["a"]
        assert [output.new_token_ids for output in outputs] == [tokens for tokens, _ in beams]
        scores = [output.cumulative_logprob for output in outputs]
        assert scores == pytest.approx([total for _, total in beams], abs=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("top", [0, 3, -1])
def test_logprobs_are_those_of_the_results_own_lines(tiny_checkpoint, eos, top):
    path, prompt = tiny_checkpoint("llama"), PROMPTS[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = make(path, page_size=4, kv_cache_tokens=4 * 44)
    params = BeamSearchParams(
        4, 9, stop_token_ids=(eos,), logprobs=top, repetition_penalty=1.4, temperature=0.7
    )
    engine.add_beam_search("a", prompt, params)
    engine.add_beam_search("b", [3, *prompt], params)
    engine.add_beam_search("c", [4, *prompt], BeamSearchParams(4, 9))
    results = run(engine)
    assert all(output.logprobs is None for output in results["c"])
    assert len({len(output.new_token_ids) for output in results["a"]}) > 1, (
        "one ends before the others"
    )
    for output in results["a"]:
        tokens = list(output.new_token_ids)
        raw = model(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
        raw = raw[len(prompt) - 1 : -1]
        own = raw[range(len(tokens)), tokens]
        found = output.logprobs
        assert found.logprobs == pytest.approx(own.numpy(), abs=1e-4)
        assert found.ranks.tolist() == ((raw > own.unsqueeze(1)).sum(-1) + 1).tolist()
        best = raw.topk(320 if top < 0 else top)
        assert found.top_logprobs == pytest.approx(best.values.numpy(), abs=1e-4)
        if top == 3:
            assert found.top_ids.tolist() == best.indices.tolist()


@pytest.mark.parametrize("logprobs", [None, 1])
def test_fewer_results_come_where_no_more_are_allowed(tiny_checkpoint, logprobs):
    engine = make(tiny_checkpoint("llama"))
    params = BeamSearchParams(4, 3, ignore_eos=True, allowed_token_ids=[9], logprobs=logprobs)
    engine.add_beam_search("a", PROMPTS[0], params)
    (output,) = run(engine)["a"]
    assert output.new_token_ids == (9, 9, 9)
    assert output.num_results == 1
    no_more = BeamSearchParams(
        4, 3, ignore_eos=True, allowed_token_ids=[9], bad_words_token_ids=[[9, 9]],
        logprobs=logprobs,
    )  # fmt: skip
    engine.add_beam_search("b", PROMPTS[0], no_more)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        engine.check()
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert all("no token is left to choose" in output.error for output in outputs)


@pytest.mark.parametrize("broken", ["raises", "nan"])
def test_a_function_that_fails_ends_its_own_search_only(tiny_checkpoint, broken):
    def function(generated, scores):
        if len(generated) == 2:
            if broken == "raises":
                raise RuntimeError("no")
            scores[5] = torch.nan
        return scores

    engine = make(tiny_checkpoint("llama"))
    bad = BeamSearchParams(3, 6, n=2, ignore_eos=True, logits_processors=[function])
    good = BeamSearchParams(3, 6, n=2, ignore_eos=True)
    engine.add_beam_search("bad", PROMPTS[0], bad)
    engine.add_beam_search("good", PROMPTS[0], good)
    found = {}
    while engine.has_unfinished():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
        engine.check()
    expected = "logits_processors[0] failed" if broken == "raises" else "infinite or NaN"
    assert [output.finish_reason for output in found["bad"]] == ["error", "error"]
    assert all(expected in output.error for output in found["bad"])
    assert [output.finish_reason for output in found["good"]] == ["length", "length"]
    assert make_report(engine).pages_held == 0
    assert not any(node.draft for node in engine.tree.nodes())


class Broken:
    """A watch of lines that fails at their third token."""

    def __init__(self, length=0):
        self.length = length

    def follow(self, token):
        if self.length == 2:
            raise ArithmeticError("on purpose")
        return Broken(self.length + 1), None


def test_a_search_that_fails_ends_alone(tiny_checkpoint):
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")), dtype="float32", kv_cache_tokens=2048, max_num_seqs=16
    )
    engine = Engine(config, watch_lines=lambda params, prompt_token_ids: Broken())
    engine.add_beam_search("bad", PROMPTS[0], BeamSearchParams(3, 6, stop="x", ignore_eos=True))
    engine.add_beam_search("good", PROMPTS[0], BeamSearchParams(3, 6, ignore_eos=True))
    engine.add_request("plain", PROMPTS[0], GREEDY)
    found = {}
    while engine.has_unfinished():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
        engine.check()
    assert [output.index for output in found["bad"]] == [0, 1, 2]
    assert all("search failed: ArithmeticError: on purpose" in o.error for o in found["bad"])
    assert [output.finish_reason for output in found["good"]] == ["length"] * 3
    assert len(found["plain"]) == 10 and found["plain"][-1].finish_reason == "length"
    assert make_report(engine).pages_held == 0
    assert not any(node.draft for node in engine.tree.nodes())


def test_a_step_is_one_forward_and_copies_a_page_for_each_beam_that_diverges(tiny_checkpoint):
    """All live beams of two searches, and an ordinary request beside them; the first is a hit."""
    engine = make(tiny_checkpoint("llama"), page_size=4, speculation="off")
    engine.add_request("before", PROMPTS[0], GREEDY)
    run(engine)
    rows, copied, forked = [], 0, 0
    forward = engine.runner.decoder.forward
    engine.runner.decoder.forward = lambda ids, *rest: rows.append(len(ids)) or forward(ids, *rest)
    scheduler, fork = engine.scheduler, engine.scheduler.fork
    schedule = scheduler.schedule

    def counted_fork(parent, child):
        nonlocal forked
        forked += 1
        return fork(parent, child)

    def counted_schedule():
        nonlocal copied
        made = schedule()
        copied += len(made.copies)
        return made

    scheduler.fork, scheduler.schedule = counted_fork, counted_schedule
    engine.add_beam_search("a", PROMPTS[0], BeamSearchParams(4, 8, ignore_eos=True))
    engine.add_beam_search("b", PROMPTS[0], BeamSearchParams(3, 8, ignore_eos=True))
    engine.add_request("c", PROMPTS[0], GREEDY)
    results = run(engine)
    assert rows[:2] == [3, 8] and set(rows[1:8]) == {8}, (
        "a row for each beam, and one for the other request"
    )
    assert [output.cached_tokens for output in results["a"]] == [len(PROMPTS[0]) - 1] * 4
    # At the start the prompt's last page, which is cached, is copied three times.
    assert forked >= 5 and copied <= forked + 3


def test_the_best_line_so_far_is_reported_when_it_changes(tiny_checkpoint, eos):
    engine = make(tiny_checkpoint("llama"))
    params = BeamSearchParams(4, 12, stop_token_ids=(eos,), length_penalty=0.7, best_so_far=True)
    engine.add_beam_search("a", PROMPTS[1], params)
    reported, results = [], []
    while engine.has_unfinished():
        group = engine._searches._groups["a"]
        for output in engine.step():
            if output.best_so_far is None:
                results.append(output)
                continue
            best = output.best_so_far
            assert (output.new_token_ids, output.finish_reason) == ((), None)
            ended = [(each.score, each.tokens) for each in group.search.finished]
            live = [
                (beam.logprob / len(beam.tokens) ** 0.7, beam.tokens) for beam in group.search.beams
            ]
            assert (best.score, best.token_ids) == max(ended + live)
            assert (best.finish_reason is not None) == ((best.score, best.token_ids) in ended)
            reported.append(best.token_ids)
    assert len(results) == 4
    assert len(reported) > 3 and len(set(reported)) == len(reported)
    pairs = pairwise(reported)
    assert any(after[: len(before)] != before for before, after in pairs), "no mere continuation"


def union(size, lines):
    """The number of pages that hold lines of tokens, which share their common prefixes."""
    nodes = {tuple(line[:end]) for line in lines for end in range(1, len(line) + 1)}
    tails = {node for node in nodes if not len(node) % size}
    # A line's unfinished last page is its own, unless another line continues after it.
    ends = {node for node in nodes if not any(other[:-1] == node for other in nodes)}
    return len(tails) + sum(len(node) % size != 0 for node in ends)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 3])
def test_beams_that_die_give_their_pages_back_in_that_step(tiny_checkpoint, page_size, n):
    engine = make(tiny_checkpoint("llama"), page_size=page_size)
    prompt = PROMPTS[0]
    engine.add_beam_search("a", prompt, BeamSearchParams(4, 24, n=n, ignore_eos=True))
    outputs, most, dead = [], 0, 0
    while engine.has_unfinished():
        before = {id(sequence) for sequence in engine._sequences}
        outputs = engine.step()
        engine.check()
        after = {id(sequence) for sequence in engine._sequences}
        dead += len(before - after)
        if not outputs:
            assert engine.tree.evictable_pages == 0, "every page is free or a live beam's"
            most = max(most, make_report(engine).pages_held)
    assert dead > 8, "beams must have died"
    kept = [[*prompt, *output.new_token_ids][:-1] for output in outputs]
    pages = engine.tree.pool
    assert engine.tree.cached_tokens == len(
        {tuple(k[: e + 1]) for k in kept for e in range(len(k))}
    )
    assert pages.num_pages - pages.free_pages <= union(page_size, kept) + n
    for line in kept:
        assert engine.tree.match(line, engine.intake.namespace(None)).length == len(line)
    assert most <= len(prompt) // page_size + 4 * (-(-24 // page_size) + 1)


def results_of(search):
    """The results that may still be returned."""
    return search.results() if search.done else search.finished


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 4])
def test_results_that_are_beaten_give_their_pages_back_in_that_step(tiny_checkpoint, page_size, n):
    engine = make(tiny_checkpoint("llama"), page_size=page_size)
    params = BeamSearchParams(
        4, 30, n=n, early_stopping="never", length_penalty=1.2, ignore_eos=True,
        stop_token_ids=tuple(range(0, 320, 12)),
    )  # fmt: skip
    prompt = PROMPTS[0]
    engine.add_beam_search("a", prompt, params)
    search = engine._searches._groups["a"].search
    beaten, alone = 0, 0
    while engine.has_unfinished():
        engine.step()
        engine.check()
        beaten += len(search.beaten)
        standing = [[*prompt, *result.tokens[:-1]] for result in results_of(search)]
        lines = [sequence.tokens.tolist() for sequence in engine._sequences]
        for node in engine.tree.nodes():
            tokens = array("i", node.prefix()).tolist()
            assert any(line[: node.end] == tokens for line in standing + lines)
        alone += engine.tree.evictable_pages
        used = engine.num_pages - engine.tree.pool.free_pages
        # A line may have a copy of the page in which it left the one that it was forked from.
        assert used <= union(page_size, standing + lines) + len(standing) + len(lines)
    assert beaten > 2, "results must have been beaten"
    assert alone > 0, "results must have stood that no beam continues"
    assert used <= union(page_size, standing) + n
    for line in standing:
        assert engine.tree.match(line, engine.intake.namespace(None)).length == len(line)
    assert not any(node.draft or node.wanted for node in engine.tree.nodes())


def test_a_search_drops_no_result_of_another_one_that_asks_for_more(tiny_checkpoint):
    """Two searches of one prompt have the same beams; one returns one result, the other four."""
    engine = make(tiny_checkpoint("llama"), page_size=4)
    params = BeamSearchParams(4, 20, ignore_eos=True, stop_token_ids=tuple(range(0, 320, 12)))
    engine.add_beam_search("one", PROMPTS[0], replace(params, n=1))
    engine.add_beam_search("all", PROMPTS[0], params)
    results = run(engine)
    assert len(results["one"]) == 1 and len(results["all"]) == 4
    for output in results["all"]:
        line = [*PROMPTS[0], *output.new_token_ids][:-1]
        assert engine.tree.match(line, engine.intake.namespace(None)).length == len(line)
    assert not any(node.draft or node.wanted for node in engine.tree.nodes())


def test_an_aborted_search_leaves_only_its_prompt_and_results(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"), page_size=4)
    params = BeamSearchParams(4, 30, ignore_eos=True, stop_token_ids=tuple(range(0, 320, 12)))
    engine.add_beam_search("a", PROMPTS[0], params)
    search = engine._searches._groups["a"].search
    while len(search.finished) < 3:
        engine.step()
    assert engine.abort("a")
    assert not engine.has_unfinished()
    engine.check()
    assert make_report(engine).pages_held == 0
    kept = [[*PROMPTS[0], *result.tokens[:-1]] for result in search.finished]
    prefixes = {
        tuple(line[:end]) for line in [*kept, PROMPTS[0]] for end in range(1, 1 + len(line))
    }
    assert engine.tree.cached_tokens == len(prefixes)
    assert not any(node.draft or node.wanted for node in engine.tree.nodes())


def test_drafts_of_preempted_and_aborted_beams_are_dropped(tiny_checkpoint):
    """In a pool so small that beams wait, only prompts and results stay."""
    engine = make(tiny_checkpoint("llama"), page_size=4, kv_cache_tokens=4 * 36)
    params = BeamSearchParams(4, 24, n=1, ignore_eos=True)
    for number, name in enumerate("abcdef"):
        engine.add_beam_search(name, [number, *PROMPTS[0]], params)
    for _ in range(6):
        engine.step()
        engine.check()
    assert engine.abort("b")
    results = run(engine)
    assert engine.counters.preemptions > 0
    assert set(results) == set("acdef")
    assert not any(node.draft for node in engine.tree.nodes())
    alone = make(tiny_checkpoint("llama"), page_size=4)
    for number, name in enumerate("abcdef"):
        if name != "b":
            alone.add_beam_search(name, [number, *PROMPTS[0]], params)
    for name, (output,) in run(alone).items():
        assert output.new_token_ids == results[name][0].new_token_ids


def test_a_draft_that_another_request_has_hit_outlives_its_beam(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"), page_size=4)
    engine.add_beam_search("a", PROMPTS[0], BeamSearchParams(4, 20, n=1, ignore_eos=True))
    for _ in range(9):
        engine.step()
    node = max((node for node in engine.tree.nodes() if node.draft), key=lambda node: node.end)
    line = array("i", node.prefix()).tolist()
    engine.add_request("b", [*line, 7], SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    assert engine.abort("a")
    engine.check()
    run(engine)
    assert engine.tree.match(line, engine.intake.namespace(None)).length == len(line)
    assert not any(node.draft for node in engine.tree.nodes())


def test_max_model_len_ends_a_search(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"), max_model_len=32, page_size=4)
    engine.add_beam_search("a", [3] * 26, BeamSearchParams(3, 10**6, ignore_eos=True))
    outputs = run(engine)["a"]
    assert [len(output.new_token_ids) for output in outputs] == [6, 6, 6]
    assert {output.finish_reason for output in outputs} == {"length"}


def test_a_search_that_cannot_run_is_refused_by_name(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"), kv_cache_tokens=128, page_size=16)
    with pytest.raises(ValueError, match="beam_width must be at most max_num_seqs, 16, got 17"):
        engine.add_beam_search("a", [1, 2], BeamSearchParams(17))
    with pytest.raises(ValueError, match=r"beam_width: 4 beams of 16 tokens .* up to 12 pages"):
        engine.add_beam_search("a", [1, 2], BeamSearchParams(4, 16))
    with pytest.raises(ValueError, match="prompt must be shorter than 128 tokens"):
        engine.add_beam_search("a", [1] * 200, BeamSearchParams(4, 16))
    with pytest.raises(ValueError, match="stop must be token ids here"):
        engine.add_beam_search("a", [1, 2], BeamSearchParams(2, 4, stop="x"))
    with pytest.raises(ValueError, match="bad_words must be token ids here"):
        engine.add_beam_search("a", [1, 2], BeamSearchParams(2, 4, bad_words=["x"]))
    with pytest.raises(ValueError, match="logit_bias must be from 0 to 319, got 400"):
        engine.add_beam_search("a", [1, 2], BeamSearchParams(2, 4, logit_bias={400: 1.0}))
    assert not engine.has_unfinished()


@pytest.mark.parametrize("seqs", [2, 4])
def test_beams_that_find_no_place_are_no_requests_of_their_own(tiny_checkpoint, seqs):
    engine = make(tiny_checkpoint("llama"), max_num_seqs=seqs, kv_cache_tokens=256)
    prompts = [[number, *range(10, 40)] for number in range(3)]
    for number, prompt in enumerate(prompts):
        engine.add_beam_search(str(number), prompt, BeamSearchParams(2, 8, ignore_eos=True))
    results = run(engine)
    assert {each.cached_tokens for outputs in results.values() for each in outputs} == {0}
    report = make_report(engine)
    counts = report.accounts.overall.since_start
    assert (counts.requests, counts.prompt_tokens, counts.hit_tokens) == (3, 93, 0)
    assert (report.requests, report.prompt_tokens, report.hit_tokens) == (3, 93, 0)
    assert [each.request_id for each in report.recent] == ["0", "1", "2"]

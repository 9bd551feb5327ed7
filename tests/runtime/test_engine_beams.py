"""Beam search in the engine: transformers' results, beside other requests, from few pages."""

from __future__ import annotations

from array import array

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.runtime.beam_search import BeamSearchParams
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine import Engine
from coppice.runtime.sampling_params import SamplingParams

PROMPTS = ([5, 9, 33, 7, 12, 81, 44, 3, 3, 17, 60], [5, 9, 33, 7, 12, 81, 2, 8], [1])
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def make(path, **options):
    options = {
        "kv_cache_tokens": 2048,
        "max_num_seqs": 16,
        "attention_backend": "reference",
    } | options
    return Engine(EngineConfig(model=str(path), dtype="float32", **options))


def run(engine):
    """Outputs by request; every page and lock is recounted after each step."""
    results = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            results.setdefault(output.request_id, []).append(output)
        engine.check()
    assert engine.cache_report().pages_held == 0
    return results


@torch.inference_mode()
def theirs(path, prompt, params, eos):
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
    )
    found = []
    scores = out.sequences_scores.tolist()
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), scores, strict=True):
        end = row.index(eos) + 1 if eos in row else params.max_tokens
        found.append((row[:end], pytest.approx(score, abs=1e-4)))
    return found


@pytest.fixture(scope="module")
def eos(tiny_checkpoint):
    """A token that ends some beams of the first prompt on their way."""
    engine = make(tiny_checkpoint("llama"))
    engine.add_request("a", PROMPTS[0], GREEDY)
    (outputs,) = run(engine).values()
    return outputs[4].new_token_ids[0]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [(2, 1.0, False), (4, 0.5, True), (8, 2.0, "never")],
)
def test_sequences_and_scores_are_those_of_transformers(
    tiny_checkpoint, family, width, length_penalty, early_stopping, eos
):
    path = tiny_checkpoint(family)
    params = BeamSearchParams(
        width, 9, length_penalty=length_penalty, early_stopping=early_stopping,
        stop_token_ids=(eos,), ignore_eos=True,
    )  # fmt: skip
    expected = [theirs(path, prompt, params, eos) for prompt in PROMPTS]
    roomy = {"page_size": 4}
    chunks = {"page_size": 1, "max_num_batched_tokens": 16}
    pages = -(-(max(map(len, PROMPTS)) + 9) // 4) + width * 5
    tiny = {"page_size": 4, "kv_cache_tokens": 4 * pages}
    for options in (roomy, chunks, tiny, {"page_size": 16, "enable_prefix_caching": False}):
        engine = make(path, **options)
        for number, prompt in enumerate(PROMPTS):
            engine.add_beam_search(f"beams {number}", prompt, params)
            engine.add_request(f"plain {number}", prompt, GREEDY)
        results = run(engine)
        for number in range(len(PROMPTS)):
            outputs = results[f"beams {number}"]
            assert [output.index for output in outputs] == list(range(width))
            found = [(list(output.new_token_ids), output.score) for output in outputs]
            assert found == expected[number], options


def test_beams_share_pages_and_prompt_and_winners_stay_cached(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"), page_size=4)
    params = BeamSearchParams(4, 8, n=2, ignore_eos=True)
    engine.add_beam_search("a", PROMPTS[0], params)
    most = 0
    while engine.has_unfinished():
        outputs = engine.step()
        engine.check()
        report = engine.cache_report()
        most = max(most, report.pages_held)
    separate = 4 * -(-(len(PROMPTS[0]) + 8) // 4)
    assert most < separate, "no more than separate sequences would take"
    assert len(outputs) == 2
    for output in outputs:
        tokens = [*PROMPTS[0], *output.new_token_ids]
        assert engine.tree.match(tokens, engine.intake.namespace(None)).length == len(tokens) - 1


def union(size, lines):
    """Pages that hold lines of tokens which share what they have in common."""
    nodes = {tuple(line[:end]) for line in lines for end in range(1, len(line) + 1)}
    tails = {node for node in nodes if not len(node) % size}
    # A line's unfinished last page is its own, unless another line goes on behind it.
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
            most = max(most, engine.cache_report().pages_held)
    assert dead > 8, "beams have died on the way"
    kept = [[*prompt, *output.new_token_ids][:-1] for output in outputs]
    pages = engine.tree.pool
    assert engine.tree.cached_tokens == len(
        {tuple(k[: e + 1]) for k in kept for e in range(len(k))}
    )
    assert pages.num_pages - pages.free_pages <= union(page_size, kept) + n
    for line in kept:
        assert engine.tree.match(line, engine.intake.namespace(None)).length == len(line)
    assert most <= len(prompt) // page_size + 4 * (-(-24 // page_size) + 1)


def test_what_preempted_and_aborted_beams_left_goes_too(tiny_checkpoint):
    """From a pool so small that beams wait: nothing but prompts and results stays."""
    engine = make(tiny_checkpoint("llama"), page_size=4, kv_cache_tokens=4 * 36)
    params = BeamSearchParams(4, 24, n=1, ignore_eos=True)
    for number, name in enumerate("abcdef"):
        engine.add_beam_search(name, [number, *PROMPTS[0]], params)
    for _ in range(6):
        engine.step()
        engine.check()
    assert engine.abort("b")
    results = run(engine)
    assert engine.scheduler.preemptions > 0
    assert set(results) == set("acdef")
    drafts = [node for node in engine.tree.nodes() if node.draft]
    assert not drafts
    alone = make(tiny_checkpoint("llama"), page_size=4)
    for number, name in enumerate("abcdef"):
        if name != "b":
            alone.add_beam_search(name, [number, *PROMPTS[0]], params)
    for name, (output,) in run(alone).items():
        assert output.new_token_ids == results[name][0].new_token_ids


def test_what_another_request_has_hit_outlives_its_beam(tiny_checkpoint):
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


def test_a_beam_search_can_be_aborted(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"))
    engine.add_beam_search("a", PROMPTS[0], BeamSearchParams(4, 20))
    for _ in range(3):
        engine.step()
    assert engine.abort("a")
    assert not engine.has_unfinished()
    engine.check()
    assert engine.cache_report().pages_held == 0


def test_what_can_not_run_is_refused_by_name(tiny_checkpoint):
    engine = make(tiny_checkpoint("llama"), kv_cache_tokens=128, page_size=16)
    with pytest.raises(ValueError, match="beam_width must be at most max_num_seqs, 16, got 17"):
        engine.add_beam_search("a", [1, 2], BeamSearchParams(17))
    with pytest.raises(ValueError, match=r"beam_width: 4 beams of 16 tokens .* up to 12 pages"):
        engine.add_beam_search("a", [1, 2], BeamSearchParams(4, 16))
    assert not engine.has_unfinished()

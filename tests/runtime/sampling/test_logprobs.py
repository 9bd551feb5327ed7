"""Logprobs of generated tokens and of prompts against transformers' logits, warm and cold."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.radix import check
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.logprobs import Logprobs
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.sampling import prompt_scores
from coppice.runtime.sampling.logprob_rows import best_of_rows, log_probabilities, of_tokens

TOLERANCE = {"atol": 1e-4, "rtol": 0}


def tokens_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(count)]


DOCUMENT = tokens_of(0, 41)
PROMPTS = [
    DOCUMENT + tokens_of(1, 9),
    DOCUMENT + tokens_of(2, 3),
    DOCUMENT[:20] + tokens_of(3, 30),
    tokens_of(4, 1),
    DOCUMENT,
    tokens_of(5, 70),
]


@pytest.fixture(scope="session")
def reference(tiny_checkpoint):
    """Log-softmax of the logits of all rows of some tokens, by transformers, float32 [T, V]."""
    models = {}

    def compute(family, tokens):
        if family not in models:
            loaded = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family))
            models[family] = loaded.float().eval()
        with torch.inference_mode():
            return models[family](torch.tensor([tokens])).logits[0].log_softmax(-1)

    return compute


def engine(path, **options) -> Engine:
    # Each output has one token, and its logprobs.
    defaults = {"kv_cache_tokens": 2048, "attention_backend": "reference", "speculation": "off"}
    options = {**defaults, **options}
    return Engine(EngineConfig(model=str(path), dtype="float32", **options))


class Result:
    """Of one request: its tokens, their logprobs, those of its prompt, and its hit."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.prompt: list[Logprobs] = []
        self.cached = -1
        self.reason: str | None = None


def run(made: Engine, prompts, params, **options) -> list[Result]:
    params = params if isinstance(params, list) else [params] * len(prompts)
    results = [Result() for _ in prompts]
    for index, prompt in enumerate(prompts):
        made.add_request(str(index), prompt, params[index], **options)
    while made.has_unfinished():
        for output in made.step():
            result = results[int(output.request_id)]
            result.tokens.extend(output.new_token_ids)
            if output.logprobs is not None:
                result.logprobs.append(output.logprobs)
            if output.prompt_logprobs is not None:
                result.prompt.append(output.prompt_logprobs)
            result.cached, result.reason = output.cached_tokens, output.finish_reason
        made.check()
        if made.intake.known_logprobs.tree is not None:
            check(made.intake.known_logprobs.tree, [])
    return results


def assert_right(found: Logprobs, tokens, expected: torch.Tensor, top: int) -> None:
    """`found` has the logprobs that the rows of `expected` give to `tokens`."""
    own = expected[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)]
    assert found.logprobs.dtype == np.float32
    torch.testing.assert_close(torch.from_numpy(found.logprobs), own, **TOLERANCE)
    # Ranks and ids may differ only where two values are closer than the tolerance.
    more = (expected > own[:, None] + 1e-4).sum(-1).numpy()
    less = (expected > own[:, None] - 1e-4).sum(-1).numpy()
    assert (found.ranks >= more + 1).all()
    assert (found.ranks <= less).all()
    assert found.top_ids.shape == found.top_logprobs.shape == (len(tokens), top)
    best = expected.topk(top, dim=-1).values
    torch.testing.assert_close(torch.from_numpy(found.top_logprobs), best, **TOLERANCE)
    theirs = expected.gather(1, torch.from_numpy(found.top_ids).long())
    torch.testing.assert_close(torch.from_numpy(found.top_logprobs), theirs, **TOLERANCE)
    assert all(len(set(row)) == top for row in found.top_ids.tolist())


def assert_right_prompt(found: Logprobs, prompt, expected: torch.Tensor, top: int) -> None:
    assert len(found) == len(prompt)
    assert_right(found[1:], prompt[1:], expected[: len(prompt) - 1], top)


def test_logprobs_are_those_of_the_raw_logits(tiny_checkpoint, reference, family) -> None:
    """With any temperature, filters, penalties and biases."""
    made = engine(tiny_checkpoint(family))
    asked = [0, 3, -1, 5, 20, 1]
    params = [
        SamplingParams(
            logprobs=top, max_tokens=6, seed=top, temperature=top % 3, ignore_eos=True,
            top_p=0.7, repetition_penalty=1.4, presence_penalty=0.5,
            logit_bias={9: 20.0} if top == 3 else None,
        )
        for top in asked
    ]  # fmt: skip
    for result, prompt, top in zip(run(made, PROMPTS, params), PROMPTS, asked, strict=True):
        assert len(result.logprobs) == 6 == len(result.tokens)
        assert not result.prompt
        expected = reference(family, prompt + result.tokens)[len(prompt) - 1 : -1]
        for place, found in enumerate(result.logprobs):
            width = 320 if top < 0 else top
            assert_right(found, result.tokens[place : place + 1], expected[place, None], width)


def test_equally_probable_tokens_have_one_rank() -> None:
    logprobs = log_probabilities(torch.tensor([[1.0, 3.0, 1.0, 2.0, 3.0, 0.0]]))
    found = of_tokens(logprobs.repeat(3, 1), [2, 4, 5], -1)
    assert found.ranks.tolist() == [4, 1, 6]
    assert found.top_ranks()[0].tolist() == [1, 1, 3, 4, 4, 6]


def test_others_tokens_do_not_depend_on_logprobs(tiny_checkpoint) -> None:
    made = engine(tiny_checkpoint("llama"))
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    asking = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    expected = [result.tokens for result in run(made, PROMPTS, plain)]
    made.reset_cache()
    mixed = run(made, PROMPTS, [plain, asking] * 3)
    assert [result.tokens for result in mixed] == expected
    assert [bool(result.logprobs) for result in mixed] == [False, True] * 3
    assert [len(result.prompt) for result in mixed] == [0, 1] * 3


@pytest.mark.pairwise
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole"),
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 4}, id="small-chunks"),
        pytest.param({"kv_cache_tokens": 128}, id="tiny-pool"),
        pytest.param({"enable_prefix_caching": False}, id="no-cache"),
    ],
)
def test_prompt_logprobs_cold_and_warm(
    tiny_checkpoint, reference, family, page_size, options, monkeypatch
) -> None:
    monkeypatch.setattr(prompt_scores, "SLICE_ROWS", 16)
    made = engine(tiny_checkpoint(family), page_size=page_size, **options)
    asked = [0, 3, -1, 5, 20, 1]
    for _ in range(2):
        params = [
            SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=k, ignore_eos=True)
            for k in asked
        ]
        for result, prompt, top in zip(run(made, PROMPTS, params), PROMPTS, asked, strict=True):
            (found,) = result.prompt
            expected = reference(family, prompt)
            assert_right_prompt(found, prompt, expected, 320 if top < 0 else top)
            assert len(result.tokens) == 9
    if "kv_cache_tokens" in options and page_size == 1:
        assert make_report(made).preemptions > 0


def test_only_what_is_missing_is_computed(tiny_checkpoint, reference) -> None:
    """The hit ends where the logprobs that are known end, and from there on all of it is used."""
    made = engine(tiny_checkpoint("llama"))
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=4)
    plain = SamplingParams(temperature=0, max_tokens=1)

    def one(prompt, params, **options):
        (result,) = run(made, [prompt], params, **options)
        if params.prompt_logprobs is not None:
            top = params.prompt_logprobs
            expected = reference("llama", prompt)
            assert_right_prompt(result.prompt[0], prompt, expected, 320 if top < 0 else top)
        return result.cached

    prompt = PROMPTS[0]
    assert one(prompt, plain) == 0
    assert one(prompt, ask) == 0, "the KV is there, the rows are not"
    assert one(prompt, ask) == len(prompt) - 1
    assert one(PROMPTS[1], ask) == 40, "the row of the last common token gives another one's"
    assert one(DOCUMENT[:30], ask) == 29
    # As many alternatives as are kept serve requests for fewer, and for no more than those.
    few = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    assert one(prompt, few) == len(prompt) - 1
    all_of_them = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    assert one(prompt, all_of_them) == 0
    # Another namespace knows nothing of it.
    assert one(prompt, ask, cache_salt="mine") == 0
    # What others compute in the ordinary way is no hit without logprobs, and no harm.
    longer = [*prompt, *tokens_of(8, 20)]
    assert one(longer, plain) == len(prompt)
    assert one(longer, ask) == len(prompt) - 1
    made.reset_cache()
    assert one(prompt, ask) == 0


def test_kv_that_was_evicted_is_computed_again_where_logprobs_are_known(
    tiny_checkpoint, reference
) -> None:
    """Without logits of the prompt's rows."""
    made = engine(tiny_checkpoint("llama"))
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    run(made, [PROMPTS[0]], ask)
    made.tree.evict(made.num_pages)
    seen = []
    logits = made.runner.decoder.logits
    made.runner.decoder.logits = lambda hidden: seen.append(len(hidden)) or logits(hidden)
    (result,) = run(made, [PROMPTS[0]], ask)
    assert result.cached == 0
    assert seen == [1]
    assert_right_prompt(result.prompt[0], PROMPTS[0], reference("llama", PROMPTS[0]), 2)


def test_logits_are_made_a_few_rows_at_a_time(tiny_checkpoint, monkeypatch) -> None:
    made = engine(tiny_checkpoint("llama"))
    seen = []
    logits = made.runner.decoder.logits
    made.runner.decoder.logits = lambda hidden: seen.append(len(hidden)) or logits(hidden)
    monkeypatch.setattr(prompt_scores, "SLICE_ROWS", 32)
    run(made, [PROMPTS[0], PROMPTS[5]], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert max(seen) == 32
    assert sum(seen) == 2 + 49 + 69


def test_requests_that_come_together_compute_a_shared_document_once(tiny_checkpoint) -> None:
    made = engine(tiny_checkpoint("llama"))
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    results = run(made, [[*DOCUMENT, index, index] for index in range(3, 9)], ask)
    assert [result.cached for result in results] == [0] + [40] * 5
    assert make_report(made).computed_tokens == 43 + 5 * 3


def test_a_function_that_fails_ends_its_own_request_only(tiny_checkpoint) -> None:
    def fail_late(generated, logits):
        if len(generated) == 2:
            raise RuntimeError("enough")
        return logits

    made = engine(tiny_checkpoint("llama"))
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    failing = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logits_processors=[fail_late]
    )
    alone = run(made, PROMPTS[:2], plain)
    results = run(made, PROMPTS[:2], [plain, failing])
    assert [result.reason for result in results] == ["length", "error"]
    assert results[0].tokens == alone[0].tokens
    assert results[1].tokens == alone[1].tokens[:2]
    assert made.counters.failed_steps == 0


def test_the_engine_refuses_what_it_can_not_do(tiny_checkpoint) -> None:
    made = engine(tiny_checkpoint("llama"))
    for params, message in (
        (SamplingParams(bad_words=["word"]), "^bad_words must be token ids here"),
        (SamplingParams(allowed_token_ids=[320]), "^allowed_token_ids must be from 0 to 319"),
        (SamplingParams(logit_bias={320: 1}), "^logit_bias must be from 0 to 319"),
        (SamplingParams(logprobs=321), "^logprobs must be at most 320"),
    ):
        with pytest.raises(ValueError, match=message):
            made.add_request("a", [1], params)
    assert not made.has_unfinished()


@pytest.mark.parametrize("start", [0, 1, 2, 41, 49])
@pytest.mark.parametrize("caching", [True, False])
def test_prompt_logprobs_from_a_start_on(tiny_checkpoint, reference, start, caching):
    """What lies before is not computed for it; known ones are used, unknown ones not kept."""
    made = engine(tiny_checkpoint("llama"), page_size=4, enable_prefix_caching=caching)
    tokens = PROMPTS[0]
    assert len(tokens) == 50
    run(made, [DOCUMENT], SamplingParams(max_tokens=1))
    before = make_report(made).computed_tokens
    ask = SamplingParams(max_tokens=1, prompt_logprobs=2, prompt_logprobs_start=start)
    (result,) = run(made, [tokens], ask)
    computed = make_report(made).computed_tokens - before
    cached = min(41, max(0, start - 1)) if caching else 0
    assert computed == len(tokens) - cached
    expected = reference("llama", tokens)
    (found,) = result.prompt
    own = [float(expected[place - 1, tokens[place]]) for place in range(max(1, start), 50)]
    np.testing.assert_allclose(found.logprobs[max(1, start) :], own, **TOLERANCE)
    # Then all of them: the first request stored right ones, and no others.
    whole = replace(ask, prompt_logprobs_start=0)
    for params in (whole, ask, whole):
        (result,) = run(made, [tokens], params)
        begin = max(1, params.prompt_logprobs_start)
        own = [float(expected[place - 1, tokens[place]]) for place in range(begin, 50)]
        np.testing.assert_allclose(result.prompt[0].logprobs[begin:], own, **TOLERANCE)
    longer = [*tokens, 7, 8, 9]
    (result,) = run(made, [longer], replace(ask, prompt_logprobs_start=50))
    expected = reference("llama", longer)
    own = [float(expected[place - 1, longer[place]]) for place in range(50, 53)]
    np.testing.assert_allclose(result.prompt[0].logprobs[50:], own, **TOLERANCE)
    if caching:
        known = made.intake.known_logprobs.tree
        assert known.match(array("i", longer).tobytes(), made.intake.namespace(None)).length == 53


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_logprobs_start": 3}, "prompt_logprobs_start must be 0 without prompt_logprobs"),
        ({"prompt_logprobs": 1, "prompt_logprobs_start": -1}, "prompt_logprobs_start must be an"),
        ({"prompt_logprobs": 1, "prompt_logprobs_start": 2}, "prompt_logprobs_start must be below"),
    ],
)
def test_a_bad_start_is_refused(tiny_checkpoint, options, message):
    made = engine(tiny_checkpoint("llama"))
    with pytest.raises(ValueError, match=message):
        made.add_request("a", [1, 2], SamplingParams(**options))
    assert not made.has_unfinished()


@pytest.mark.parametrize("width", [100, 128 * 40, 128 * 40 + 77])
def test_the_best_of_a_row_are_those_of_all(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    scores = torch.randn(5, width, generator=generator)
    scores[1, -3:] = 9  # after the last whole chunk, or at its end
    scores[2, width // 2 :] = -torch.inf
    scores[3] = 1.5  # all alike
    for count in (1, 8, 10):
        values, places = best_of_rows(scores, count)
        assert torch.equal(values, scores.topk(count).values)
        assert torch.equal(scores.gather(1, places), values)
        assert all(len(set(row)) == count for row in places.tolist())
    scores[4, width // 3] = torch.nan
    values, places = best_of_rows(scores, 2)
    assert values[4, 0].isnan()
    assert places[4, 0] == width // 3

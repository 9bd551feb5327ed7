"""Adapters through the whole engine, beside models that were changed by the definition of LoRA."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_files import ALL, ATTENTION, greedy_by, invoked, load, merged, save_adapter
from tiered_engine import loading_pays

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.model.adapters import changes
from coppice.runtime.model.adapters.names import Adapters
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.runtime.conftest import FAMILIES, OTHER_FAMILIES

TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
INVOCATION = (301, 302, 303)

Asked = tuple[Sequence[int], LoRARequest | None]


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(count)]


PROMPT = ids(1, 29)


def start(path: Path, **options: Any) -> Engine:
    small: dict[str, Any] = {
        "kv_cache_tokens": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 24, "page_size": 7,
        "enable_lora": True,
    }  # fmt: skip
    return Engine(EngineConfig(model=str(path), **(small | options)))


def run(
    engine: Engine, asked: Sequence[Asked], params: Any = GREEDY, **options: Any
) -> list[list[int]]:
    """The tokens of all sequences of requests that run together, in their order."""
    for number, (prompt, adapter) in enumerate(asked):
        add = engine.add_beam_search if isinstance(params, BeamSearchParams) else engine.add_request
        add(str(number), list(prompt), params, lora_request=adapter, **options)
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished():
        for step in engine.step():
            assert step.error is None, step.error
            tokens.setdefault((step.request_id, step.index), []).extend(step.new_token_ids)
        engine.check()
    assert make_report(engine).pages_held == 0
    return [tokens[key] for key in sorted(tokens)]


def hits(engine: Engine, asked: Sequence[Asked], **options: Any) -> int:
    """The prompt tokens that these requests hit."""
    before = make_report(engine).hit_tokens
    run(engine, asked, **options)
    return make_report(engine).hit_tokens - before


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Three adapters of the Llama, of different ranks and projections."""
    model, folder = load(llama), tmp_path_factory.mktemp("adapters")
    save_adapter(folder / "0", model, seed=10)
    save_adapter(folder / "1", model, seed=11, targets=ATTENTION, rank=3, use_rslora=True)
    save_adapter(folder / "2", model, seed=12, targets=["up_proj", "v_proj"], rank=8)
    return [LoRARequest(f"adapter {n}", n + 1, str(folder / str(n))) for n in range(3)]


@pytest.fixture(scope="module")
def alora(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    """An adapter that INVOCATION invokes."""
    folder = tmp_path_factory.mktemp("alora")
    save_adapter(folder, load(llama), seed=20, alora_invocation_tokens=list(INVOCATION))
    return LoRARequest("judge", 9, str(folder))


@pytest.mark.model("adapters")
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_tokens_equal_those_of_a_merged_model_cold_and_warm(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    path = tiny_checkpoint(family)
    targets = ATTENTION if family in EXPERTS else ALL
    save_adapter(tmp_path, load(path), targets=targets)
    adapter = LoRARequest("own", 1, str(tmp_path))
    expected = greedy_by(merged(path, tmp_path), PROMPT, TOKENS)
    base = greedy_by(load(path), PROMPT, TOKENS)
    assert expected != base
    engine = start(path)
    assert run(engine, [(PROMPT, adapter)]) == [expected]
    assert hits(engine, [(PROMPT, adapter)]) == len(PROMPT) - 1
    assert run(engine, [(PROMPT, None), (PROMPT, adapter)]) == [base, expected]


def test_logits_equal_those_of_a_merged_model(llama: Path, adapters: list[LoRARequest]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    engine = start(llama)
    for adapter in adapters:
        engine.add_request("scored", PROMPT, params, lora_request=adapter)
        found = [out.prompt_logprobs for _ in range(3) for out in engine.step()]
        ours = next(each for each in found if each is not None).logprobs[1:]
        model = merged(llama, Path(adapter.lora_path))
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
        theirs = logits.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_adapters_and_the_base_model_run_in_one_batch(
    llama: Path, adapters: list[LoRARequest]
) -> None:
    """Each as it does alone, warm as cold, with `n` and beams as well."""
    asked = [(PROMPT, each) for each in (*adapters, None)] + [(PROMPT[:11], adapters[0])]
    alone = [run(start(llama), [each])[0] for each in asked]
    assert len({tuple(tokens) for tokens in alone}) == len(asked)
    engine = start(llama)
    assert run(engine, asked) == alone
    assert run(engine, asked) == alone
    sampled = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
    for params in (sampled, BeamSearchParams(2, 4, ignore_eos=True)):
        apart = [tokens for each in asked for tokens in run(start(llama), [each], params)]
        assert run(engine, asked, params) == apart


def test_bits_do_not_depend_on_the_batch(llama: Path, adapters: list[LoRARequest]) -> None:
    """The logprobs of an adapter's request, alone and among others, have the same bits."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)

    def bits(beside: Sequence[LoRARequest | None]) -> bytes:
        engine = start(llama, enable_prefix_caching=False)
        for number, each in enumerate((adapters[0], *beside)):
            engine.add_request(str(number), ids(number, 9), params, lora_request=each)
        found = b""
        while engine.has_unfinished():
            for out in engine.step():
                if out.request_id == "0" and out.logprobs is not None:
                    found += out.logprobs.top_logprobs.tobytes()
        return found

    assert bits([]) == bits([adapters[1], None, adapters[0], adapters[2]])


def test_dense_products_as_on_a_gpu_give_the_same_tokens(
    llama: Path, adapters: list[LoRARequest], alora: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Asked] = [(PROMPT, each) for each in (*adapters, None)]
    asked.append(([*PROMPT, *INVOCATION, 5], alora))
    compiled = run(start(llama), asked)
    monkeypatch.setattr(changes, "low_rank_kernels", lambda: None)
    engine = start(llama)
    assert run(engine, asked) == compiled
    engine.sleep(1)
    engine.wake_up()
    assert run(engine, asked) == compiled


def test_an_adapters_tokens_are_hit_by_its_own_requests_alone(
    llama: Path, adapters: list[LoRARequest]
) -> None:
    engine, first = start(llama), adapters[0]
    run(engine, [(PROMPT, first)])
    whole = len(PROMPT) - 1
    assert hits(engine, [(PROMPT, None)]) == 0
    assert hits(engine, [(PROMPT, adapters[1])]) == 0
    assert hits(engine, [(PROMPT, first)]) == whole
    assert hits(engine, [(PROMPT, first)], cache_salt="other") == 0
    assert hits(engine, [(PROMPT, first)], tenant="one") == 0
    assert hits(engine, [(PROMPT, first)], tenant="one") == whole


def test_preempted_requests_continue_with_their_adapters(
    llama: Path, adapters: list[LoRARequest], alora: LoRARequest
) -> None:
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    asked: list[Asked] = [(ids(n, 11), each) for n, each in enumerate((*adapters, None))]
    asked.append(([*ids(1, 11), *INVOCATION, 5], alora))
    alone = [run(start(llama), [each], long)[0] for each in asked]
    engine = start(llama, kv_cache_tokens=119)
    assert run(engine, asked, long) == alone
    assert make_report(engine).preemptions > 0


def test_int8_takes_adapters_warm_as_cold(llama: Path, adapters: list[LoRARequest]) -> None:
    engine = start(llama, quantization="int8")
    asked = [(PROMPT, each) for each in (*adapters, None)]
    cold = run(engine, asked)
    assert run(engine, asked) == cold
    assert len({tuple(tokens) for tokens in cold}) == len(asked)


def test_a_step_without_adapters_runs_the_compiled_layers(
    llama: Path, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(llama)
    engine.adapters.load(adapters[0])
    compiled = engine.runner.decoder.compiled
    assert compiled is not None
    calls = []
    whole = compiled.hidden_states
    monkeypatch.setattr(
        compiled, "hidden_states", lambda *args: calls.append(1) or whole(*args), raising=True
    )
    run(engine, [(PROMPT, None)])
    assert len(calls) == 7  # two chunks of the prompt, five tokens more
    run(engine, [(PROMPT, adapters[0])])
    assert len(calls) == 7


# -- loading and unloading -----------------------------------------------------------------------


def test_unloading_frees_the_pages_and_a_new_adapter_hits_nothing_old(
    llama: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    engine = start(llama)
    run(engine, [(PROMPT, None)])
    base_pages = engine.tree.cached_pages
    run(engine, [(PROMPT, adapters[0])])
    run(engine, [(PROMPT, adapters[0])], cache_salt="a")
    assert engine.tree.cached_pages > base_pages
    engine.adapters.unload(adapters[0].lora_name)
    engine.check()
    assert engine.tree.cached_pages == base_pages
    assert engine.adapters.listed() == []
    other = LoRARequest(adapters[0].lora_name, 1, adapters[1].lora_path)
    alone = run(start(llama), [(PROMPT, other)])
    engine.adapters.load(other)
    assert hits(engine, [(PROMPT, other)]) == 0
    assert run(engine, [(PROMPT, other)]) == alone
    # In place of it, while it has pages in the cache.
    engine.adapters.load(adapters[0], replace=True)
    assert hits(engine, [(PROMPT, adapters[0])]) == 0
    with pytest.raises(ValueError, match="no adapter is named 'nobody'"):
        engine.adapters.unload("nobody")


def test_an_adapter_that_is_unloaded_in_use_serves_until_its_requests_end(
    llama: Path, adapters: list[LoRARequest]
) -> None:
    engine, adapter = start(llama), adapters[0]
    alone = run(start(llama), [(PROMPT, adapter)])
    engine.add_request("runs", PROMPT, GREEDY, lora_request=adapter)
    engine.step()
    engine.adapters.unload(adapter.lora_name)
    assert engine.runner.adapters is not None
    assert engine.runner.adapters.numbers == (0,)
    tokens: list[int] = []
    while engine.has_unfinished():
        for out in engine.step():
            tokens += out.new_token_ids
        engine.check()
    assert [tokens] == alone
    assert engine.runner.adapters.numbers == ()
    assert engine.tree.cached_pages == 0


def test_too_many_adapters_are_refused_and_nothing_else(
    llama: Path, adapters: list[LoRARequest]
) -> None:
    engine = start(llama, max_loras=2)
    run(engine, [(PROMPT, adapters[0]), (PROMPT, adapters[1])])
    with pytest.raises(ValueError, match=r"one adapter too many: max_loras is 2, and 2 are loaded"):
        engine.add_request("third", PROMPT, GREEDY, lora_request=adapters[2])
    engine.adapters.unload(adapters[0].lora_name)
    assert len(run(engine, [(PROMPT, adapters[2])])) == 1


def test_the_same_files_at_another_path_are_the_same_adapter(
    llama: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    engine, adapter = start(llama), adapters[0]
    engine.adapters.load(adapter)
    run(engine, [(PROMPT, adapter)])
    elsewhere = shutil.copytree(adapter.lora_path, tmp_path / "elsewhere")
    moved = LoRARequest(adapter.lora_name, 7, str(elsewhere))
    engine.adapters.load(moved, replace=True)
    assert engine.adapters.listed() == [moved]
    assert hits(engine, [(PROMPT, moved)]) == len(PROMPT) - 1, "requests ask for it as it is now"


def test_names_and_numbers_stand_for_one_adapter(llama: Path, adapters: list[LoRARequest]) -> None:
    engine, first, second = start(llama), adapters[0], adapters[1]
    engine.adapters.load(first)
    with pytest.raises(ValueError, match="named 'adapter 0' is loaded already"):
        engine.adapters.load(first)
    with pytest.raises(ValueError, match="unload it first"):
        engine.add_request(
            "a", PROMPT, GREEDY, lora_request=LoRARequest("adapter 0", 1, second.lora_path)
        )
    with pytest.raises(ValueError, match=r"lora_int_id must differ .* got 1, which 'adapter"):
        engine.adapters.load(LoRARequest("another", 1, second.lora_path))
    with pytest.raises(ValueError, match="lora_path: it is '/nowhere'; there is no such folder"):
        engine.adapters.load(LoRARequest("lost", 5, "/nowhere"))
    assert engine.adapters.listed() == [first]


def test_adapters_must_be_enabled(llama: Path, adapters: list[LoRARequest]) -> None:
    with pytest.raises(ValueError, match="adapters are off, give enable_lora"):
        start(llama, enable_lora=False).add_request("a", PROMPT, GREEDY, lora_request=adapters[0])
    with pytest.raises(ValueError, match="enable_lora must be False with deterministic"):
        EngineConfig(model="x", enable_lora=True, deterministic=True)


def test_a_pinned_prefix_of_an_adapter_stays_until_it_is_unloaded(
    llama: Path, adapters: list[LoRARequest], alora: LoRARequest
) -> None:
    engine = start(llama)
    prompt = [*PROMPT, *INVOCATION, 4, 5]
    for adapter in (adapters[0], alora):
        engine.pin(adapter.lora_name, prompt[:-1], lora_request=adapter, prompt_token_ids=prompt)
        run(engine, [(prompt, adapter)])
        (pin,) = engine.pins
        assert pin.cached_tokens == len(prompt) - 1
        engine.adapters.unload(adapter.lora_name)
        assert not list(engine.pins)
        engine.check()


# -- activated LoRA ------------------------------------------------------------------------------


def test_an_invoked_adapter_computes_what_the_definition_says(
    llama: Path, alora: LoRARequest
) -> None:
    folder = Path(alora.lora_path)
    # The last occurrence counts; what stands before the first and between both is the base's.
    prompt = [*PROMPT, *INVOCATION, *ids(4, 5), *INVOCATION, 7]
    begin = len(PROMPT) + len(INVOCATION) + 5
    expected = greedy_by(invoked(llama, folder, begin), prompt, TOKENS)
    assert expected != greedy_by(invoked(llama, folder, len(PROMPT)), prompt, TOKENS)
    assert expected != greedy_by(load(llama), prompt, TOKENS)
    engine = start(llama)
    assert run(engine, [(prompt, alora)]) == [expected]
    assert run(engine, [(prompt, alora), (prompt, None)])[0] == expected


def test_an_invoked_adapter_hits_what_the_base_has_cached_before_it(
    llama: Path, alora: LoRARequest
) -> None:
    """Token by token, whatever the page size; and the base hits what it left there."""
    for page_size in (1, 7, 16):
        engine = start(llama, page_size=page_size)
        alone = run(start(llama), [([*PROMPT, *INVOCATION, 8], alora)])
        run(engine, [(PROMPT, None)])
        prompt = [*PROMPT, *INVOCATION, 8]
        assert hits(engine, [(prompt, alora)]) == len(PROMPT)
        assert run(engine, [(prompt, alora)]) == alone
        assert hits(engine, [(prompt, alora)]) == len(prompt) - 1
        # The base model has none of the tokens from the invocation on.
        assert hits(engine, [(prompt, None)]) == len(PROMPT)
        assert hits(engine, [(prompt, None)]) == len(prompt) - 1
        # What the adapter's request computed before it is the base model's.
        other = ids(77, 23)
        assert hits(engine, [([*other, *INVOCATION], alora)]) == 0
        assert hits(engine, [([*other, 9], None)]) == len(other)
        assert hits(engine, [([*other, *INVOCATION, 5], alora)]) == len(other) + len(INVOCATION)
        # In another namespace of the base there is nothing.
        assert hits(engine, [(prompt, alora)], cache_salt="s") == 0
        assert hits(engine, [(prompt, None)], cache_salt="s") == len(PROMPT)


def test_two_invoked_adapters_share_the_base_and_nothing_else(
    llama: Path, alora: LoRARequest, tmp_path: Path
) -> None:
    save_adapter(
        tmp_path, load(llama), seed=33, rank=2, alora_invocation_tokens=list(INVOCATION[:1])
    )
    other = LoRARequest("other", 2, str(tmp_path))
    prompt = [*PROMPT, *INVOCATION, 8]
    alone = [run(start(llama), [(prompt, each)])[0] for each in (alora, other, None)]
    engine = start(llama)
    run(engine, [(prompt, alora)])
    assert hits(engine, [(prompt, other)]) == len(PROMPT)
    assert run(engine, [(prompt, each) for each in (alora, other, None)]) == alone
    pages = engine.tree.cached_pages
    engine.adapters.unload("judge")
    engine.check()
    assert engine.tree.cached_pages < pages
    assert hits(engine, [(prompt, other)]) == len(prompt) - 1
    assert hits(engine, [(prompt, None)]) == len(prompt) - 1


def test_what_an_invoked_adapter_computed_comes_back_from_the_disk_for_it_alone(
    llama: Path, alora: LoRARequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading_pays(monkeypatch)
    # As if the digests of all adapters had the same end: names of pages depend on all of them.
    monkeypatch.setattr(Adapters, "_mark", lambda self, digest: 1 << 30)
    folder = tmp_path / "other"
    save_adapter(folder, load(llama), seed=33, rank=2, alora_invocation_tokens=list(INVOCATION))
    other = LoRARequest("other", 2, str(folder))
    prompt = [*ids(5, 80), *INVOCATION, *ids(6, 40)]
    alone = {each: run(start(llama), [(prompt, each)]) for each in (alora, other, None)}
    assert len({str(each) for each in alone.values()}) == 3
    # Of the base model's, another adapter finds whole pages.
    for asked, found in ((alora, 0), (other, 77), (alora, 122), (None, 80), (other, 122)):
        engine = start(llama, disk_cache=str(tmp_path / "pages"), disk_cache_size="64MiB")
        assert hits(engine, [(prompt, asked)]) == found
        assert run(engine, [(prompt, asked)]) == alone[asked]
        if asked is not None:  # its pages leave the tree with their names
            engine.adapters.unload(asked.lora_name)
            engine.check()
        engine.close()


def test_a_prompt_that_does_not_invoke_it_is_the_base_models(
    llama: Path, alora: LoRARequest
) -> None:
    engine = start(llama)
    base = run(engine, [(PROMPT, None)])
    assert hits(engine, [(PROMPT, alora)]) == len(PROMPT) - 1
    assert run(engine, [(PROMPT, alora)]) == base


def test_beams_and_n_with_an_invoked_adapter(llama: Path, alora: LoRARequest) -> None:
    prompt = [*PROMPT, *INVOCATION, 8]
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=5, ignore_eos=True)
    for params in (sampled, BeamSearchParams(3, 5, ignore_eos=True)):
        cold = run(start(llama, enable_prefix_caching=False), [(prompt, alora)], params)
        engine = start(llama)
        run(engine, [(PROMPT, None)])
        assert run(engine, [(prompt, alora)], params) == cold
        assert run(engine, [(prompt, alora)], params) == cold


def test_known_logprobs_are_those_of_the_adapter(llama: Path, alora: LoRARequest) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = [*PROMPT, *INVOCATION, 8, 9]

    def scores(engine: Engine, adapter: LoRARequest | None) -> np.ndarray:
        engine.add_request("scored", prompt, params, lora_request=adapter)
        found = []
        while engine.has_unfinished():
            found += [each.prompt_logprobs for each in engine.step()]
        return next(each for each in found if each is not None).logprobs[1:]

    engine = start(llama)
    base, own = scores(engine, None), scores(engine, alora)
    np.testing.assert_allclose(scores(start(llama), alora), own, atol=1e-4)
    begin = len(PROMPT)  # its token's logprob is still the base model's
    np.testing.assert_allclose(base[:begin], own[:begin], rtol=1e-5)
    assert (abs(base[begin:] - own[begin:]) > 1e-3).all()
    np.testing.assert_array_equal(scores(engine, alora), own)


def test_a_peek_finds_what_a_request_would_hit(llama: Path, alora: LoRARequest) -> None:
    engine = start(llama)
    run(engine, [(PROMPT, None)])
    found = engine.peek([*PROMPT, *INVOCATION, 8], lora_request=alora)
    assert found.cached_tokens == len(PROMPT)

"""Families that differ in their layers: through the whole engine, with the kernels of the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from transformers import AutoModelForCausalLM

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.runtime.conftest import FAMILIES, OTHER_FAMILIES

TOKENS = 8
#: A plain family, and those that differ most: windows and soft-caps, sinks, experts.
SHOWN = ("llama", "gemma2", "gpt_oss", "qwen3_moe")
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


def shown(families: Iterable[str]) -> list[ParameterSet]:
    """All as parameters; those that differ less run with the slow tests."""
    return [pytest.param(each, marks=[pytest.mark.slow] * (each not in SHOWN)) for each in families]


def prompts() -> list[list[int]]:
    """Of which two share a beginning that is longer than every window."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(33)]
    return [
        [*shared, *(rng.randrange(3, 320) for _ in range(9))],
        [*shared, *(rng.randrange(3, 320) for _ in range(4))],
        [rng.randrange(3, 320) for _ in range(21)],
    ]


def start(path: Path, **options: object) -> Engine:
    limits = {"kv_cache_tokens": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    return Engine(EngineConfig(model=str(path), **(limits | options)))


def run(engine: Engine, params: SamplingParams | BeamSearchParams = GREEDY) -> list[list[int]]:
    """The tokens of all sequences, in the order of prompts."""
    for number, prompt in enumerate(prompts()):
        if isinstance(params, BeamSearchParams):
            engine.add_beam_search(str(number), prompt, params)
        else:
            engine.add_request(str(number), prompt, params)
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished():
        for step in engine.step():
            tokens.setdefault((step.request_id, step.index), []).extend(step.new_token_ids)
        engine.check()
    assert make_report(engine).pages_held == 0
    return [tokens[key] for key in sorted(tokens)]


def generated(path: Path, **options: object) -> list[list[int]]:
    """The same by transformers, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").float().eval()
    rows: list[list[int]] = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
            min_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0, **options,
        )  # fmt: skip
        rows += made[:, len(prompt) :].tolist()
    return rows


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], list[list[int]]]:
    """What transformers generates for a family, once for all page sizes."""
    return cache(lambda family: generated(tiny_checkpoint(family)))


@pytest.mark.model("tokens")
@pytest.mark.parametrize(
    ("family", "page_size"),
    [
        pytest.param(family, size, marks=[pytest.mark.slow] * (size != 7 and family not in SHOWN))
        for family in OTHER_FAMILIES
        for size in (1, 7, 16)
    ],
)
def test_greedy_tokens_equal_transformers_cold_and_warm(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[list[int]]],
    family: str,
    page_size: int,
) -> None:
    engine = start(tiny_checkpoint(family), page_size=page_size)
    assert engine.runner.decoder.compiled is not None
    assert run(engine) == expected(family)
    before = make_report(engine).hit_tokens
    assert run(engine) == expected(family)
    hits = make_report(engine).hit_tokens - before
    assert hits == sum(len(prompt) - 1 for prompt in prompts())


@pytest.mark.model("n")
@pytest.mark.parametrize("family", shown([*FAMILIES, *OTHER_FAMILIES]))
def test_several_sequences_share_what_a_single_one_computed(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    path = tiny_checkpoint(family)
    sampled = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)
    engine = start(path, page_size=7)
    cold = run(engine, sampled)
    assert run(engine, sampled) == cold == run(start(path, enable_prefix_caching=False), sampled)


@pytest.mark.model("beams")
@pytest.mark.parametrize("family", shown(OTHER_FAMILIES))
def test_beams_equal_transformers(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    path = tiny_checkpoint(family)
    search = BeamSearchParams(3, TOKENS, ignore_eos=True)
    expected = generated(path, num_beams=3, num_return_sequences=3)
    assert run(start(path, page_size=7), search) == expected


@pytest.mark.model("int8")
@pytest.mark.parametrize("family", shown([*FAMILIES, *OTHER_FAMILIES]))
def test_int8_is_warm_what_it_is_cold(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    engine = start(tiny_checkpoint(family), page_size=7, quantization="int8")
    cold = run(engine)
    assert run(engine) == cold

"""transformers' models of other families: through the whole engine, on pages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from coppice.runtime.engine.core import Engine
from coppice.runtime.report.gather import make_report
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.runtime.engine.test_families import TOKENS, generated, prompts, run, start
from tests.runtime.transformers.conftest import ALIKE, FAMILIES

#: Families that differ in what attention is asked for: a plain one, windows, soft-caps, sinks,
#: keys and values of different sizes, experts.
KINDS = ("stablelm", "cohere2", "vaultgemma", "granite_swa", "minicpm3", "olmoe")


def chosen(families: Collection[str]) -> list[ParameterSet]:
    """All families as parameters; those that are not among these run with the slow tests."""
    return [
        pytest.param(each, marks=[pytest.mark.slow] * (each not in families)) for each in FAMILIES
    ]


def equal_cold_and_warm(engine: Engine, expected: list[list[int]]) -> None:
    assert engine.model_config.implementation == "transformers"
    assert run(engine) == expected
    before = make_report(engine).hit_tokens
    assert run(engine) == expected
    hits = make_report(engine).hit_tokens - before
    assert hits == sum(len(prompt) - 1 for prompt in prompts())


@pytest.mark.model("tokens")
@pytest.mark.parametrize("family", chosen(FAMILIES.keys() - ALIKE))
def test_greedy_tokens_equal_generate_cold_and_warm(
    foreign_checkpoint: Callable[..., Path], family: str
) -> None:
    path = foreign_checkpoint(family)
    expected = generated(path)
    equal_cold_and_warm(start(path, page_size=7), expected)
    if family in KINDS:
        for page_size in (1, 16):
            equal_cold_and_warm(start(path, page_size=page_size), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_our_own_families_run_through_transformers_when_asked_to(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    path = tiny_checkpoint(family)
    assert start(path).model_config.implementation == "coppice"
    equal_cold_and_warm(start(path, model_impl="transformers"), generated(path))


@pytest.mark.model("n", "beams")
@pytest.mark.parametrize("family", chosen(("vaultgemma", "granite_swa", "minicpm3")))
def test_several_sequences_and_beams_share_what_one_computed(
    foreign_checkpoint: Callable[..., Path], family: str
) -> None:
    path = foreign_checkpoint(family)
    engine = start(path, page_size=7)
    sampled = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)
    cold = run(engine, sampled)
    assert run(engine, sampled) == cold == run(start(path, enable_prefix_caching=False), sampled)
    search = BeamSearchParams(3, TOKENS, ignore_eos=True)
    assert run(engine, search) == generated(path, num_beams=3, num_return_sequences=3)


@pytest.mark.model("int8")
@pytest.mark.parametrize("family", chosen(("cohere2", "minicpm3", "gpt2")))
def test_int8_is_warm_what_it_is_cold(foreign_checkpoint: Callable[..., Path], family: str) -> None:
    engine = start(foreign_checkpoint(family), page_size=7, quantization="int8")
    cold = run(engine)
    assert run(engine) == cold

"""Nothing is compiled after the start: each launch's variant has been launched by warming up.

Triton compiles a kernel for each set of constants and types, and for integers that are 1 or
multiples of 16, and addresses that are multiples of 16. A launcher that counts such sets stands for
the compiler, and for the time that interpreting would take.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mixed_requests import make_engine, make_prompts

from coppice.kernels.sampling import choose_triton
from coppice.kernels.triton.backend import INTERPRETED
from coppice.kernels.triton.products import steady_linear
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.warm_up import WarmStep, warm_plan, warm_steps

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="with a GPU test_cuda_engine.py does this")


class CountingCompiler:
    """The variants that launches ask for; with ``runs`` kernels are interpreted, too."""

    def __init__(self, monkeypatch, runs):
        from triton.runtime.interpreter import InterpretedFunction

        self.variants, usual = set(), InterpretedFunction.run

        def run(kernel, *args, grid, warmup, **options):
            self.variants.add(self._variant(kernel, args, options))
            if runs:
                usual(kernel, *args, grid=grid, warmup=warmup, **options)

        monkeypatch.setattr(InterpretedFunction, "run", run)

    @staticmethod
    def _variant(kernel, args, options):
        free = kernel.kwargs.get("do_not_specialize") or ()
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        found = []
        for name, value in given.items():
            if torch.is_tensor(value):
                value = (value.dtype, value.data_ptr() % 16 == 0)
            elif isinstance(value, float):
                value = "float"
            elif isinstance(value, int) and not name.isupper() and not name.startswith("num_"):
                value = "int" if name in free else (value == 1, value % 16 == 0)
            elif name in free:
                value = "int"
            found.append((name, value))
        return (kernel.__name__, *sorted(found, key=str))


def test_the_choice_of_tokens_compiles_nothing_after_its_warm_up(monkeypatch):
    compiler = CountingCompiler(monkeypatch, runs=False)
    choose_triton.warm_up(50_001, torch.device("cpu"))
    before = set(compiler.variants)
    assert len(before) > 10
    for rows in (1, 3, 16, 70, 256):
        logits = torch.zeros(rows, 50_001)
        for top_k in (1, 7, 50_001):
            for top_p in (0.5, 1.0):
                columns = np.array([[1.0, top_k, top_p, 0.0, 0.5]] * rows)
                choose_triton.choose_rows(logits, torch.from_numpy(columns), columns)
        last = columns[-1:].copy()
        choose_triton.choose_rows(logits[-1:], torch.from_numpy(last), last)
    assert compiler.variants == before


@pytest.mark.parametrize("outputs", [256, 250])
def test_products_compile_nothing_after_few_and_many_rows(monkeypatch, outputs):
    """With `deterministic`: parts by themselves and together, whatever the number of rows."""
    compiler = CountingCompiler(monkeypatch, runs=False)
    weight = torch.empty(outputs, 2048)
    for rows in (1, 8192):
        steady_linear(torch.empty(rows, 2048), weight)
    before = set(compiler.variants)
    assert sorted(name for name, *_ in before) == ["add_parts", "multiply_rows", "multiply_rows"]
    for rows in (2, 16, 17, 129, 1000, 4096, 8191):
        steady_linear(torch.empty(rows, 2048), weight)
    assert compiler.variants == before


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_requests_of_every_kind_compile_nothing_after_the_start(
    tiny_checkpoint, monkeypatch, family
):
    compiler = CountingCompiler(monkeypatch, runs=True)
    engine = make_engine(
        tiny_checkpoint(family), device="cpu", attention_backend="triton", page_size=4,
        max_num_batched_tokens=64,
    )  # fmt: skip
    engine.runner.warm_up()
    before = set(compiler.variants)
    common = {"max_tokens": 3, "ignore_eos": True}
    kinds = [
        SamplingParams(temperature=0.9, n=2, top_k=7, seed=1, **common),
        SamplingParams(temperature=0, repetition_penalty=1.2, **common),
        SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1, **common),
        SamplingParams(temperature=0.9, top_p=0.5, **common),
    ]
    for number, (prompt, params) in enumerate(zip(make_prompts(26), kinds, strict=True)):
        engine.add_request(str(number), prompt, params)
        for output in engine.step():
            assert output.error is None
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
    assert "copy_page_words" in {name for name, *_ in before}
    assert compiler.variants - before == set()


def test_the_kinds_of_steps():
    names = [step.name for step in warm_steps(8192, 40_960, drafts=False)]
    assert len(names) == len(set(names)) == 6
    assert len(warm_steps(8192, 40_960, drafts=True)) == 10
    # Those with more rows than a step may have are left out.
    few = warm_steps(2, 40_960, drafts=True)
    assert all(sum(rows for rows, _ in step.sequences) <= 2 for step in few) and few


def test_a_plan_names_the_spare_page_only_and_is_valid():
    for step in warm_steps(64, 300, drafts=True):
        plan = warm_plan(step, 4, 9)
        plan.check(10)
        assert set(plan.page_indices.tolist()) == {9}
    plan = warm_plan(WarmStep("a draft", ((3, 20),), True), 4, 0)
    assert plan.branches.positions.tolist() == [17, 18, 18]
    wide = warm_plan(WarmStep("many", ((49, 49), (2, 9)), True), 4, 0)
    wide.check(1)
    assert wide.branches.seen[48] == 1 | 1 << 48

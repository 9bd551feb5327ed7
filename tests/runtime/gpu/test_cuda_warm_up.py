"""Nothing is compiled after the start of an engine on a GPU, as Triton itself tells it.

Without a GPU test_warm_up.py shows this, with launches that are told apart as Triton does; and here
the hook that counts is tried on a chip that is not there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from counting_compiler import Compilations
from mixed_requests import make_engine, make_prompts

from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# A kernel that is compiled for a chip by the name of sm_90, and launched on none.
TRIED = """
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from counting_compiler import Compilations

class Chip:
    get_current_device = get_current_stream = lambda *arguments: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

driver.set_active(Chip())

@triton.jit
def numbers(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at, mask=at < n)

def launch(n):
    numbers.run(torch.zeros(64, dtype=torch.int32), n, BLOCK=64, grid=(1,), warmup=True)

launch(16)
with Compilations() as compiled:
    counts = []
    for n in (32, 5, 7, 1, 5):
        launch(n)
        counts.append(len(compiled.names))
launch(16)
print(counts, "numbers" in compiled.names[0])
"""


@NEEDS_GPU
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_requests_of_every_kind_compile_nothing_after_the_start(
    tiny_checkpoint, family, dtype, eager
):
    engine = make_engine(
        tiny_checkpoint(family), device="cuda", dtype=dtype, attention_backend="triton",
        page_size=16, max_num_batched_tokens=64, enforce_eager=eager,
    )  # fmt: skip
    assert "warming up" in engine.runner.warmed
    common = {"max_tokens": 4, "ignore_eos": True}
    kinds = [
        SamplingParams(temperature=0.9, n=2, top_k=7, seed=1, **common),
        SamplingParams(temperature=0, repetition_penalty=1.2, **common),
        SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1, **common),
        SamplingParams(temperature=0.9, top_p=0.5, **common),
        SamplingParams(temperature=0.9, top_k=5, top_p=0.5, min_p=0.01, **common),
        BeamSearchParams(2, 4, ignore_eos=True),
    ]
    prompts = [*make_prompts(26), [5] * 150, [6, 7, 8]]
    assert compiled_by(engine, list(zip(prompts, kinds, strict=True))) == []


@NEEDS_GPU
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("backend", "options"), [("triton", {"deterministic": True}), ("flashinfer", {})]
)
def test_deterministic_and_flashinfers_steps_compile_nothing_after_the_start(
    tiny_checkpoint, backend, options, eager
):
    """Of the latter, our own kernels around FlashInfer's."""
    path = tiny_checkpoint("llama", head_dim=128)
    options = {"dtype": "bfloat16", "page_size": 16, "max_num_batched_tokens": 64} | options
    try:
        engine = make_engine(
            path, device="cuda", attention_backend=backend, enforce_eager=eager, **options
        )
    except ValueError as error:
        if backend != "flashinfer":
            raise
        pytest.skip(str(error))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [*make_prompts(26), [5] * 150, [6, 7, 8], [9] * 16, [10] * 17, [11]]
    assert compiled_by(engine, [(prompt, params) for prompt in prompts]) == []


def compiled_by(engine, requests):
    """The names of kernels that are compiled while requests run, which they do twice."""
    with Compilations() as later:
        for again in range(2):
            for number, (prompt, params) in enumerate(requests):
                name = f"{again} {number}"
                if isinstance(params, BeamSearchParams):
                    engine.add_beam_search(name, prompt, params)
                else:
                    engine.add_request(name, prompt, params)
                for output in engine.step():
                    assert output.error is None
            while engine.has_unfinished():
                for output in engine.step():
                    assert output.error is None
    return later.names


@pytest.mark.slow
def test_the_counter_is_told_of_each_variant_once(tmp_path):
    """Integers that are 1, that are multiples of 16, and others are three variants."""
    (tmp_path / "tried.py").write_text(TRIED)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(sys.modules[Compilations.__module__].__file__).parent)
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    ran = subprocess.run(
        [sys.executable, tmp_path / "tried.py"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[0, 1, 1, 2, 2] True"

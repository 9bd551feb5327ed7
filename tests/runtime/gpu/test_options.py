"""Which device an engine takes, how much of a GPU's memory, and what it refuses there.

A few functions of torch are replaced by those of a GPU.
"""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from coppice.kernels.triton import base as triton_base
from coppice.runtime.config import EngineConfig
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.weights import resolve_device
from coppice.runtime.planning.plan import PlanOptions, make_plan
from coppice.runtime.runner.cache.size import page_bytes, plan_cache, step_bytes
from coppice.runtime.runner.forward import ModelRunner
from coppice.runtime.runner.step_sizes import device_rates, sized

CUDA = torch.device("cuda")
GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """What torch reports of a GPU: compute capability 9.0, 20 of 80 GiB free (`free`)."""
    chip = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    made = SimpleNamespace(free=20 * GIB, chip=chip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (made.free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(triton_base, "INTERPRETED", False)
    return made


def test_auto_takes_a_gpu_where_there_is_one(gpu):
    assert resolve_device("auto") == resolve_device("cuda") == CUDA
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("built", [False, True])
def test_a_gpu_that_is_not_there_is_refused(monkeypatch, tiny_checkpoint, built):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    assert resolve_device("auto") == torch.device("cpu")
    why = "finds no NVIDIA GPU" if built else "is built without CUDA"
    with pytest.raises(ValueError, match=rf"device is 'cuda', but torch {why} here"):
        ModelRunner(EngineConfig(model=str(tiny_checkpoint("llama")), device="cuda"))


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (
            {"attention_backend": "cpu"},
            "device is cuda; attention_backend 'cpu' runs on 'cpu' only",
        ),
        ({"quantization": "int8"}, "quantization 'int8' runs on a CPU only; device is cuda"),
        ({"quantization": "fp8"}, "quantization 'fp8' computes in bfloat16; dtype is float32"),
        ({"attention_backend": "reference", "deterministic": True}, "deterministic is True"),
        (
            {"quantization": "fp8", "dtype": "bfloat16", "deterministic": True},
            "quantization is 'fp8'; with deterministic True it must be None",
        ),
    ],
)
def test_what_a_gpu_does_not_run_is_refused(gpu, tiny_checkpoint, options, refusal):
    with pytest.raises(ValueError, match=refusal):
        ModelRunner(EngineConfig(model=str(tiny_checkpoint("llama")), **options))


def test_types_that_a_chip_lacks_are_refused(gpu, tiny_checkpoint):
    path = str(tiny_checkpoint("llama"))
    gpu.chip.major, gpu.chip.minor = 8, 6
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8'; with the triton attention"):
        ModelRunner(EngineConfig(model=path, kv_cache_dtype="fp8"))
    gpu.chip.major, gpu.chip.minor = 7, 5
    told = "dtype is 'bfloat16'; with the triton .* must be 'auto' or 'float16' or 'float32'"
    with pytest.raises(ValueError, match=told):
        ModelRunner(EngineConfig(model=path, dtype="bfloat16"))


def test_the_cache_gets_what_weights_and_a_step_leave(gpu, tiny_checkpoint):
    model = load_model_config(tiny_checkpoint("llama"))
    config = EngineConfig(model="m")
    step = step_bytes(config, model, torch.bfloat16)
    each = page_bytes(model, 16, torch.bfloat16)
    pages, memory = plan_cache(config, model, torch.bfloat16, CUDA)
    assert pages == int((20 * GIB - step) * 0.9) // each
    assert "0.9 of the 20.0 GiB available on the GPU, less" in memory
    half = EngineConfig(model="m", kv_cache_memory_fraction=0.5)
    assert plan_cache(half, model, torch.bfloat16, CUDA)[0] == int((20 * GIB - step) * 0.5) // each
    small, memory = plan_cache(config, model, torch.bfloat16, CUDA, torch.float8_e4m3fn)
    assert small == int((20 * GIB - step) * 0.9) // (each // 2)
    assert " x 1 bytes = " in memory


def test_a_step_takes_more_with_more_tokens_sequences_and_splits(tiny_checkpoint):
    model = load_model_config(tiny_checkpoint("llama"))

    def taken(enforce_eager=True, **options):
        config = EngineConfig(model="m", enforce_eager=enforce_eager, **options)
        return step_bytes(config, model, torch.bfloat16)

    # Rows of the widest part of a layer: residual, input and norm; gate, up and their product.
    one = 2 * (3 * 64 + 3 * 128)
    assert taken(max_num_batched_tokens=4096) - taken(max_num_batched_tokens=2048) >= 2048 * one
    assert taken(quantization="fp8") - taken() == EngineConfig(model="m").most_tokens * 128
    assert taken(max_num_seqs=65) - taken() == 320 * 48
    assert taken(deterministic=True, max_model_len=4096) < taken()
    assert taken(deterministic=True, max_model_len=400_000) > taken()
    few, many = (taken(False, cuda_graph_sizes=sizes) for sizes in ((4,), (64, 1)))
    assert taken() < few < many < taken(False), "by default also for small mixed steps"


def test_a_cache_that_does_not_fit_is_refused(gpu, tiny_checkpoint):
    model = load_model_config(tiny_checkpoint("llama"))
    much = EngineConfig(model="m", kv_cache_tokens=10**9)
    with pytest.raises(ValueError, match=r"kv_cache_tokens=1000000000 does not fit: .* GiB remain"):
        plan_cache(much, model, torch.bfloat16, CUDA)
    gpu.free = 1000
    with pytest.raises(ValueError, match=r"0 pages = 0 tokens.*room for at least 2 tokens"):
        plan_cache(EngineConfig(model="m"), model, torch.bfloat16, CUDA)


# kHz and bits, as the driver tells them.
CLOCKS = {
    "H100": {"clock_rate": 1_980_000, "memory_clock_rate": 2_619_000, "memory_bus_width": 5120},
    "H200": {"clock_rate": 1_980_000, "memory_clock_rate": 3_201_000, "memory_bus_width": 6144},
}
LARGE = {
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


def large(tiny_checkpoint, tmp_path):
    """The config of a model of 8 B parameters, without weights."""
    config = json.loads((tiny_checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **LARGE}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "terabytes", "teraflop"), [("H100", 3.35, 1070), ("H200", 4.92, 1070)]
)
def test_a_gpus_steps_follow_from_its_memory_and_rates(
    gpu, tiny_checkpoint, tmp_path, caplog, name, terabytes, teraflop
):
    vars(gpu.chip).update(CLOCKS[name])
    rates = device_rates(CUDA)
    assert rates.bandwidth == pytest.approx(terabytes * 1e12, rel=0.01)
    assert rates.products == pytest.approx(teraflop * 1e12, rel=0.01)
    path = large(tiny_checkpoint, tmp_path)
    with caplog.at_level(logging.INFO, logger="coppice.runtime"):
        made = sized(EngineConfig(model=path))
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (256, 8192)
    assert "at most 256 sequences and 8,192 tokens" in caplog.text
    assert sized(made) is made
    fewer = sized(EngineConfig(model=path, max_num_batched_tokens=100))
    assert (fewer.max_num_seqs, fewer.max_num_batched_tokens) == (100, 100)
    more = sized(EngineConfig(model=path, max_num_seqs=9000))
    assert (more.max_num_seqs, more.max_num_batched_tokens) == (9000, 9000)
    graphs = sized(EngineConfig(model=path, cuda_graph_sizes=(300,)))
    assert graphs.max_num_seqs == 300


def test_rates_that_the_driver_does_not_tell_are_assumed(gpu, tiny_checkpoint):
    assert device_rates(CUDA).balance == 250
    vars(gpu.chip).update(CLOCKS["H100"], major=99)
    assert device_rates(CUDA).balance == 250


def test_the_plan_has_the_engines_sizes(gpu, tiny_checkpoint, tmp_path):
    vars(gpu.chip).update(CLOCKS["H100"])
    path, rates = large(tiny_checkpoint, tmp_path), device_rates(CUDA)
    made = sized(EngineConfig(model=path, dtype="bfloat16"))
    options = PlanOptions(
        device_memory=rates.memory, memory_bandwidth=int(rates.bandwidth),
        product_rate=int(rates.products), dtype="bfloat16",
    )  # fmt: skip
    step = make_plan(load_model_config(tmp_path), options).step
    assert (step.seqs, step.tokens) == (made.max_num_seqs, made.max_num_batched_tokens)


def test_a_cpus_steps_are_as_they_were(tiny_checkpoint):
    made = sized(EngineConfig(model=str(tiny_checkpoint("llama")), device="cpu"))
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (64, 1024)

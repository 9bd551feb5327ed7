"""The arithmetic of plans: the textbook, real checkpoints, and decoders of all families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.runtime.config import EngineConfig
from coppice.runtime.model.config import LayerSpec, ModelConfig
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.families.registry import FAMILIES
from coppice.runtime.model.layers import Linear
from coppice.runtime.model.linear.eight_bit import Fp8Linear, Int8Linear
from coppice.runtime.planning import cache
from coppice.runtime.planning.numbers import count
from coppice.runtime.planning.plan import PlanOptions, make_plan
from coppice.runtime.planning.weights import weight_bytes
from coppice.runtime.runner.cache.size import plan_cache

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def llama(**changes: Any) -> ModelConfig:
    return FAMILIES["llama"].read(LLAMA | changes, eos_token_ids=())


def test_reserving_4096_tokens_for_500_wastes_88_percent() -> None:
    assert round(cache.reserved_waste(4096, 500), 3) == 0.878
    plan = make_plan(llama(), PlanOptions(max_model_len=4096, context=500))
    assert plan.reserved.waste == 1 - 500 / 4096


def test_a_page_and_the_pages_of_60_gb() -> None:
    plan = make_plan(llama(), PlanOptions(kv_cache_memory=60 * 10**9))
    assert plan.page_bytes == 2_097_152
    assert plan.pages == 28_610


def test_one_piece_and_pages() -> None:
    model = llama(num_key_value_heads=32)
    plan = make_plan(model, PlanOptions(users=1, max_model_len=4096, context=500))
    assert plan.reserved.bytes == 2 * 2**30
    assert plan.paged.bytes == 256 * 2**20
    assert plan.paged.pages == 32


def test_a_model_of_8_billion_parameters() -> None:
    numbers = count(llama())
    assert numbers.total == numbers.used == 8_030_261_248  # what Llama 3 8B's checkpoint has


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_checkpoint(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    path = tiny_checkpoint(family)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    model = load_model_config(path)
    assert count(model).total == theirs.num_parameters()
    spec = model.layers[0].experts
    if spec is not None:
        assert count(model).used < count(model).total


@pytest.mark.parametrize(
    ("quantization", "linear"), [(None, Linear), ("int8", Int8Linear), ("fp8", Fp8Linear)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_the_decoder(
    tiny_checkpoint: Callable[..., Path], family: str, quantization: str, linear: type[Linear]
) -> None:
    model = load_model_config(tiny_checkpoint(family))
    for dtype in (torch.float32, torch.bfloat16):
        decoder = Decoder(model, linear=linear, dtype=dtype, device=CPU, embedding_dtype=dtype)
        held = {each.data_ptr(): each.nbytes for each in decoder.parameters()}
        planned = weight_bytes(count(model), dtype.itemsize, quantization).total
        # Queries and keys are normalised at once, with a row for each head of the weights.
        rows = sum(
            (model.num_heads + model.num_kv_heads - 2) * model.head_dim * dtype.itemsize
            for layer in model.layers
            if layer.qk_norm == "head"
        )
        assert sum(held.values()) == planned + rows


def test_experts_that_do_not_compute_are_not_read() -> None:
    raw = {"model_type": "mixtral", "torch_dtype": "bfloat16"}
    numbers = count(FAMILIES["mixtral"].read(raw, eos_token_ids=()))
    assert numbers.total == 46_702_792_704  # Mixtral 8x7B
    assert numbers.used == 12_879_925_248
    read = weight_bytes(numbers, 2, None).read
    assert read == 2 * (numbers.used - numbers.embedding)  # of the embedding one row


def test_sharing_lets_more_sequences_fit() -> None:
    options = PlanOptions(kv_cache_memory=1000 * 2_097_152, context=1024, shared=512, users=10)
    plan = make_plan(llama(), options)
    assert plan.paged.fit == 1000 // 64
    assert plan.shared.fit == (1000 - 32) // 32
    assert plan.shared.pages == 32 + 10 * 32
    assert plan.paged.pages == 640
    assert plan.reserved.fit == 1


def test_the_end_of_what_is_shared_is_copied_and_one_token_is_computed() -> None:
    assert cache.pages_each(100, 20, 16) == (1, 6)
    assert cache.pages_each(32, 32, 16) == (1, 1)


def test_the_rate_is_the_bandwidth_over_the_bytes_read() -> None:
    options = PlanOptions(memory_bandwidth=10**12, context=1000, users=4, shared=600)
    plan = make_plan(llama(), options)
    weights, each = plan.weights.read, plan.token_bytes
    assert plan.alone == 10**12 / (weights + 1000 * each)
    assert plan.together == 4 * 10**12 / (weights + 600 * each + 4 * 400 * each)


def test_windows_need_fewer_keys_which_are_kept() -> None:
    raw = LLAMA | {"model_type": "gemma2", "sliding_window": 100, "head_dim": 128}
    model = FAMILIES["gemma2"].read(raw, eos_token_ids=())
    plan = make_plan(model, PlanOptions(context=1000, memory_bandwidth=10**12, users=1))
    assert plan.window_bytes == 16 * 900 * plan.token_bytes // 32
    assert plan.alone == 10**12 / (plan.weights.read + 1000 * plan.token_bytes - plan.window_bytes)
    assert plan.together == plan.alone
    assert plan.paged.pages == 63, "nothing is freed"
    assert cache.window_saving(model.sliding_windows, 1000) == (
        "16 of 32 layers attend to the last 100 tokens alone; freeing older keys would save 45.0% "
        "of the KV of a sequence of 1,000 tokens, but they are kept, since prompts that begin "
        "alike hit them"
    )
    assert cache.window_saving([LayerSpec().sliding_window], 1000) == ""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"users": 0}, "users must be at least 1, got 0"),
        ({"context": 9000}, "context must be at most max_model_len, 8192, got 9000"),
        ({"shared": 200, "context": 100}, "shared must be from 0 to context, 100, got 200"),
        ({"max_model_len": 10**6}, "max_model_len must be at most 8192"),
        ({"dtype": "int3"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
        ({"quantization": "int5"}, "quantization must be one of None, int8, int4, fp8, got 'int5'"),
        ({"device_memory": 10**9}, "device_memory is 1,000,000,000 bytes, and the weights take"),
        ({"fraction": 0.0}, "kv_cache_memory_fraction must be above 0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_plan(llama(), PlanOptions(**options))


def test_an_engine_says_what_its_windows_would_save(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    options = EngineConfig("m", kv_cache_tokens=1024, max_model_len=200)
    for family, said in (("gemma2", True), ("llama", False)):
        model = load_model_config(tiny_checkpoint(family))
        _, memory = plan_cache(options, model, torch.float32, CPU)
        saving = cache.window_saving(model.sliding_windows, 200)
        assert memory.endswith(f"; {saving}") == said
    assert "47.2% of the KV of a sequence of 200 tokens" in cache.window_saving((11, None), 200)

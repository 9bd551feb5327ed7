"""Checkpoints in AWQ, GPTQ, compressed-tensors and FP8 have the weights that were rounded so."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import greedy_by
from needed_products import needs_products
from quantised_files import CASES, COMPRESSED, write_quantised
from reference_engine import greedy, reference_engine
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.linear.eight_bit import Int8Linear
from coppice.runtime.model.linear.grouped import Int4Linear, WiderInt4Linear
from coppice.runtime.model.weights import load_decoder

CPU = torch.device("cpu")


def load(folder: Path, **options: Any) -> Decoder:
    options = {"dtype": torch.float32, "device": CPU} | options
    return load_decoder(folder, load_model_config(folder), **options)


@pytest.fixture
def quantised(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> Callable[..., tuple[Path, Path]]:
    """Folders of a checkpoint whose projections are quantised, and of the decoded numbers."""

    def make(case: str, family: str = "qwen2") -> tuple[Path, Path]:
        return write_quantised(tiny_checkpoint(family), case, tmp_path)

    return make


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_were_rounded(quantised: Callable[..., Any], case: str) -> None:
    folder, decoded = quantised(case)
    found, wanted = load(folder, lossless=True), load(decoded)
    for (name, one), other in zip(
        found.state_dict().items(), wanted.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, msg=name)


def kept(linear: Any) -> torch.Tensor:
    """The numbers of a weight in groups, before it is packed."""
    return linear.weight.numbers() * linear.weight_scale[:, None]


@needs_products("int4")
@pytest.mark.parametrize("case", ["awq", "gptq 4", "gptq v2", "w4a16", "w4a16 zeros", "gptq order"])
def test_4_bits_stay_4_bits(quantised: Callable[..., Any], case: str) -> None:
    """Except groups that do not follow each other: these get 8 bits."""
    folder, decoded = quantised(case)
    found, wanted = load(folder), load(decoded, lossless=True)
    for mine, theirs in zip(found.layers, wanted.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            one, other = getattr(mine, name), getattr(theirs, name)
            assert isinstance(one, WiderInt4Linear)
            assert one.weight.bits == (8 if case == "gptq order" else 4)
            # Scales are float16 here; those of 8 bits are new ones.
            close = 8e-3 if case == "gptq order" else 1e-3
            error = (kept(one) - other.weight).norm() / other.weight.norm()
            assert error < close, name


@needs_products("int4")
def test_a_float_type_that_is_asked_for_is_had(quantised: Callable[..., Any]) -> None:
    folder, _ = quantised("awq")
    for dtype in ("auto", "float32", "bfloat16"):
        config = EngineConfig(model=str(folder), device="cpu", kv_cache_tokens=64, dtype=dtype)
        decoder: Any = Engine(config).runner.decoder
        assert isinstance(decoder.layers[0].qkv, Int4Linear) == (dtype == "auto")


@pytest.mark.parametrize("case", ["awq", "gptq 4", "w4a16", "w8a8", "fp8 block"])
def test_an_engine_gives_the_tokens_of_the_decoded_numbers(
    quantised: Callable[..., Any], case: str
) -> None:
    folder, decoded = quantised(case)
    model = AutoModelForCausalLM.from_pretrained(decoded).eval()
    prompt = list(range(7, 90, 2))
    expected = greedy_by(model, prompt, 6)
    assert len(set(expected)) > 2, "else the comparison says little"
    engine = reference_engine(folder)
    assert greedy(engine, prompt, 6) == expected
    assert greedy(engine, prompt, 6) == expected, "from the cache"


@pytest.mark.parametrize("case", ["fp8 row", "fp8 block"])
def test_experts_are_decoded_too(quantised: Callable[..., Any], case: str) -> None:
    """On a CPU, FP8 experts become int8, as all projections do."""
    folder, decoded = quantised(case, "qwen3_moe")
    for layer in load(folder).layers:
        assert {type(each.gate_up) for each in layer.experts.experts} == {Int8Linear}
    found, wanted = load(folder, lossless=True), load(decoded)
    for one, other in zip(found.state_dict().values(), wanted.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@needs_products("int4")
def test_the_log_says_what_becomes_of_the_weights(
    quantised: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = quantised("w8a8")
    with caplog.at_level(logging.INFO):
        decoder = load(folder)
    try:
        assert isinstance(decoder.layers[0].qkv, Int8Linear)
        assert "compressed-tensors, 8 bits become int8" in caplog.text
    except AssertionError:
        assert "weights stay in 16 bits" in caplog.text, "this CPU's int8 product saturates"
    caplog.clear()
    folder, _ = quantised("awq")
    with caplog.at_level(logging.INFO):
        load(folder)
    assert "weights stored as AWQ, 4 bits become" in caplog.text
    assert "become int4" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        load(folder, as_stored=False)
    assert "become float32" in caplog.text or "become float16" in caplog.text
    assert "quantization 'int8'" in caplog.text, "what makes them smaller"
    caplog.clear()
    folder, _ = quantised("w4a16 group 16")
    with caplog.at_level(logging.INFO):
        decoder = load(folder)
    assert "become float32" in caplog.text or "become float16" in caplog.text, "groups of 16"
    assert not isinstance(decoder.layers[0].qkv, Int4Linear)


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes', which is not read; awq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv', which is not read"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits .* 2, 4 or 8 bits"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        (COMPRESSED | {"transform_config": {"a": 1}}, "a transform_config"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"quant_method": "fp8", "weight_block_size": [0]}, "weight_block_size .* two sizes"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size .* is 0; it must be"),
        (7, "is 7; it must be an object"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, described: Any, reason: str
) -> None:
    config = json.loads((tiny_checkpoint("llama") / "config.json").read_text())
    config["quantization_config"] = described
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"quantization_config|{reason}") as raised:
        load_model_config(tmp_path)
    assert __import__("re").search(reason, str(raised.value))


def test_parts_that_do_not_fit_are_named(quantised: Callable[..., Any]) -> None:
    name = "model.layers.1.mlp.down_proj"
    for case, part, change, reason in (
        ("awq", "scales", None, rf"weight {name}\.weight is stored as .*; scales is missing"),
        ("w8a8", "weight_scale", None, rf"tensor {name}\.weight is torch\.int8"),
        ("gptq 4", "qweight", lambda t: t[:5], rf"qweight of {name}\.weight has shape \(5, 64\)"),
        ("gptq 4", "qzeros", lambda t: t[:1], rf"weight {name}\.weight cannot be decoded from"),
        ("awq", "qweight", lambda t: t[:5], rf"{name}\.weight"),
        ("w4a16", "weight_packed", lambda t: t[:, :3], rf"weight {name}\.weight has shape"),
        ("w4a16", "weight_scale", lambda t: t[:, :3], rf"{name}\.weight .*: 3 groups do not div"),
    ):
        folder, _ = quantised(case)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        if change is None:
            del tensors[f"{name}.{part}"]
        else:
            tensors[f"{name}.{part}"] = change(tensors[f"{name}.{part}"]).contiguous()
        save_file(tensors, file)
        with pytest.raises(ValueError, match=reason):
            load(folder)
        shutil.rmtree(folder)


def test_one_weight_is_decoded_at_a_time(
    quantised: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    from coppice.runtime.model.files.quantized.view import DecodedSource

    alive: list[weakref.ref] = []
    read = DecodedSource._read
    most = 0

    def counted(self: DecodedSource, name: str) -> Any:
        nonlocal most
        most = max(most, sum(each() is not None for each in alive))
        found = read(self, name)
        alive.append(weakref.ref(found.numbers))
        return found

    monkeypatch.setattr(DecodedSource, "_read", counted)
    load(quantised("gptq 4")[0])
    assert len(alive) > 10
    assert most == 0, "each was dropped before the next was read"

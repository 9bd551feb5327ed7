"""GGUF files: the weights that a checkpoint of the decoded numbers has, and clear refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from needed_products import needs_products

from coppice.runtime.model.config import RopeConfig
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.files.path import resolve_model
from coppice.runtime.model.linear.grouped import Int4Linear
from coppice.runtime.model.rope import frequencies
from coppice.runtime.model.weights import load_decoder

gguf = pytest.importorskip("gguf")

from adapter_files import greedy_by  # noqa: E402
from gguf_writing import write_gguf  # noqa: E402 (it imports gguf)
from reference_engine import greedy, reference_engine  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(folder: Path, **options: Any) -> Decoder:
    options = {"dtype": torch.float32, "device": CPU} | options
    return load_decoder(folder, load_model_config(folder), **options)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q8_0"), ("llama", "Q4_1"), ("qwen2", "F16"),
        ("qwen3", "BF16"), ("gemma2", "Q8_0"), ("gemma3_text", "Q4_0"), ("phi3", "Q8_0"),
        ("qwen3_moe", "F16"),
    ],
)  # fmt: skip
def test_has_the_weights_of_the_checkpoint_that_it_was_made_of(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, kind: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family))
    file = tmp_path / "model.gguf"
    decoded = write_gguf(model, file, kind)
    model.load_state_dict(decoded, strict=False)
    model.save_pretrained(tmp_path / "decoded")
    folder = resolve_model(str(file))
    found, wanted = load_model_config(folder), load_model_config(tmp_path / "decoded")
    assert (found.num_layers, found.head_dim, found.vocab_size) == (2, 16, 320)
    if not family.startswith("gemma"):
        assert [*map(frequencies, found.ropes)] == [*map(frequencies, wanted.ropes)]
    exact, expected = load(folder, lossless=True), load(tmp_path / "decoded")
    for (name, one), other in zip(
        exact.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one.float(), other.float(), atol=1e-6, rtol=0, msg=name)
    halves = load(folder)
    half = torch.bfloat16 if kind == "BF16" else torch.float16
    narrow = {p.dtype for p in halves.parameters() if p.dim() > 1}
    assert half in narrow or narrow == {torch.float32}, "without kernels for 16 bits"


@needs_products("int4")
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "Q4_0"), ("llama", "Q4_1"), ("llama", "Q4_K"), ("qwen3_moe", "Q4_1")],
)
def test_4_bits_stay_4_bits(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, kind: str
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 256}
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family, **sizes))
    write_gguf(model, tmp_path / "model.gguf", kind)
    folder = resolve_model(str(tmp_path / "model.gguf"))
    found, wanted = load(folder), load(folder, lossless=True)
    pairs = [
        (one, other)
        for one, other in zip(found.modules(), wanted.modules(), strict=True)
        if isinstance(one, Int4Linear)
    ]
    assert len(pairs) >= 8
    for one, other in pairs:
        assert one.weight.bits == 4
        mine = one.weight.numbers() * one.weight_scale[:, None]
        assert (mine - other.weight).norm() < 1e-3 * other.weight.norm()


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q4_1", "F16", "BF16"])
def test_an_engine_gives_the_tokens_of_the_decoded_numbers(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint("llama", hidden_size=256, intermediate_size=256)
    )
    model.load_state_dict(write_gguf(model, tmp_path / "model.gguf", kind), strict=False)
    prompt = list(range(7, 90, 2))
    expected = greedy_by(model, prompt, 6)
    assert len(set(expected)) > 1, "else the comparison says little"
    engine = reference_engine(tmp_path / "model.gguf")
    assert greedy(engine, prompt, 6) == expected
    assert greedy(engine, prompt, 6) == expected, "from the cache"


def test_the_log_says_what_becomes_of_the_weights(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"))
    write_gguf(model, tmp_path / "model.gguf", "Q4_0")
    folder = resolve_model(str(tmp_path / "model.gguf"))
    assert resolve_model(str(tmp_path / "model.gguf")) == folder, "it is made once"
    with caplog.at_level(logging.INFO):
        load(folder, quantization="int8")
    assert "weights stored as GGUF's Q4_0 become int8" in caplog.text


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_1"])
def test_blocks_are_decoded_as_transformers_decodes_them(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations.gguf import dequant

    from coppice.runtime.model.files.gguf import blocks

    monkeypatch.setattr(blocks, "_BLOCK", 600)  # three pieces
    sort = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[sort]
    generator = np.random.default_rng(3)
    data = generator.integers(0, 60, (6, 512 // numbers * size), np.uint8)
    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", data, raw_dtype=sort)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
    name = "model.embed_tokens.weight"
    source = blocks.GgufSource(tmp_path, [name], lossless=True)
    assert source.headers[name].shape == (6, 512)
    expected = dequant.dequantize(torch.from_numpy(data).reshape(-1), int(sort)).view(6, 512)
    assert torch.equal(source.read(name), expected)


def test_the_rotation_of_llama_3_is_found_in_its_factors(
    tmp_path: Path,
) -> None:
    from coppice.runtime.model.files.gguf.metadata import _llama3

    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    plain = frequencies(RopeConfig("default", 128, {**rope, "rope_type": "default"}))
    stretched = frequencies(RopeConfig("llama3", 128, rope))
    factors = [a / b for a, b in zip(plain, stretched, strict=True)]
    found = _llama3(factors, 500000.0, 128, tmp_path) | {"rope_theta": 500000.0}
    assert frequencies(RopeConfig("llama3", 128, found)) == pytest.approx(stretched, rel=1e-5)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight has factor 3"):
        _llama3([1.0, 3.0, *factors[2:]], 500000.0, 128, tmp_path)


def test_broken_files_are_refused_in_words(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"))
    file = tmp_path / "model.gguf"
    write_gguf(model, file, "Q8_0")
    whole = file.read_bytes()
    for content, reason in (
        (whole[: len(whole) - 5000], r"only a part of a GGUF file: tensor \S+ ends at byte"),
        (whole[:100], "broken GGUF file, or only a part"),
        (b"GGU", "does not begin with GGUF"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"model\.gguf is .*{reason}"):
            resolve_model(str(file))
    write_gguf(model, tmp_path / "model-00001-of-00002.gguf", "Q8_0")
    with pytest.raises(ValueError, match=r"one of 2 files .*00002-of-00002\.gguf is missing"):
        resolve_model(str(tmp_path / "model-00001-of-00002.gguf"))
    file.write_bytes(whole)
    folder = resolve_model(str(file))
    config = (folder / "config.json").read_text()
    for given, changed, reason in (
        ('"num_hidden_layers": 2', '"num_hidden_layers": 3', r"lacks tensors: model\.layers\.2"),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 1', r"unexpected tensors: blk\.1\."),
        ('"hidden_size": 64', '"hidden_size": 32', r"model\.gguf: tensor \S+ has shape"),
    ):
        (folder / "config.json").write_text(config.replace(given, changed))
        with pytest.raises(ValueError, match=reason):
            load(folder)


def test_a_missing_package_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_a_folder_with_one_file_is_that_model(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"))
    write_gguf(model, tmp_path / "a.gguf", "F16", tokens=True)
    folder = resolve_model(str(tmp_path))
    assert (folder / "tokenizer.json").is_file()
    assert "messages" in (folder / "chat_template.jinja").read_text()
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"2 GGUF files; give the path of one of them"):
        resolve_model(str(tmp_path))

"""Where weights come from, how they are packed, and which checkpoints are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.files.opening import open_tensors
from coppice.runtime.model.files.path import resolve_model
from coppice.runtime.model.files.source import in_order
from coppice.runtime.model.weights import load_decoder, resolve_dtype

CPU = torch.device("cpu")


def load(folder: Path, **options: Any) -> Decoder:
    options = {"dtype": torch.float32, "device": CPU} | options
    return load_decoder(folder, load_model_config(folder), **options)


def same_weights(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.fixture
def edited(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> Callable[[Callable[[dict[str, torch.Tensor]], Any]], Path]:
    """A copy of the tiny Qwen2 checkpoint whose tensors a function has changed."""

    def edit(change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> Path:
        source = tiny_checkpoint("qwen2", **config)
        shutil.copy(source / "config.json", tmp_path)
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return edit


def test_projections_are_packed_in_order(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("qwen2")
    stored = load_file(folder / "model.safetensors")
    decoder = load(folder)
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        for kind in ("weight", "bias"):
            parts = [stored[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            assert torch.equal(getattr(layer.qkv, kind), torch.cat(parts))
        parts = [stored[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(layer.gate_up.weight, torch.cat(parts))
        assert torch.equal(layer.down.weight, stored[f"{prefix}mlp.down_proj.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_holds_the_checkpoints_bytes_and_no_more(
    tiny_checkpoint: Callable[..., Path], family: str, tied: bool
) -> None:
    folder = tiny_checkpoint(family, tie_word_embeddings=tied)
    decoder = load(folder)
    # The norms of queries and keys are spread over the heads: 4 + 2 rows in place of 1 + 1.
    spread = 2 * 4 * 16 if family == "qwen3" else 0
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert sum(p.numel() for p in decoder.parameters()) == stored + spread
    assert (decoder.head.weight is decoder.embedding) == tied
    assert not any(p.requires_grad for p in decoder.parameters())


def test_reads_sharded_checkpoints(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    folder = tiny_checkpoint(family)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert same_weights(load(folder), load(tmp_path))


def test_reading_keeps_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    """What has been read of the file leaves the process again."""

    def mapped_mb() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssFile"))

    file = tmp_path / "model.safetensors"
    names = [f"tensor{i}" for i in range(12)]
    save_file({name: torch.zeros(4 << 18) for name in names}, file)  # 4 MB each
    before = most = mapped_mb()
    source = open_tensors(tmp_path)
    for name, _ in in_order(source.headers, first=names[0], last=names[-1]):
        source.read(name).sum()
        most = max(most, mapped_mb())
    assert most - before < 16


def test_casts_to_the_asked_type(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    model.save_pretrained(tmp_path)
    assert load_model_config(tmp_path).torch_dtype == torch.float16
    # Otherwise a CPU may keep 16 bits.
    decoder = load(tmp_path, deterministic=True)
    assert decoder.embedding.dtype == torch.float32
    assert torch.equal(decoder.embedding, model.model.embed_tokens.weight.float())
    narrow = load(folder, dtype=torch.float16)
    assert {p.dtype for p in narrow.parameters()} == {torch.float16}
    assert torch.equal(narrow.embedding, model.model.embed_tokens.weight)


def test_ignores_old_rotary_buffers(
    edited: Callable[..., Path], tiny_checkpoint: Callable[..., Path]
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = edited(lambda tensors: tensors.update({name: torch.ones(8)}))
    assert same_weights(load(folder), load(tiny_checkpoint("qwen2")))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_tied_head_may_be_stored_too(
    edited: Callable[..., Path], quantization: str | None
) -> None:
    def store_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    load(edited(store_head, tie_word_embeddings=True), quantization=quantization)


def test_a_tied_head_that_differs_is_refused(edited: Callable[..., Path]) -> None:
    def store_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        load(edited(store_head, tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks .*layers.1.mlp.up_proj"),
        (lambda t: t.pop("lm_head.weight"), "lacks .*lm_head"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected .*extra"),
        (
            lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(64)}),
            "unexpected .*o_proj.bias",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            r"model.norm.weight has shape \(63,\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(32, 64)}),
            r"q_proj.weight has shape \(32, 64\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "model.norm.weight is torch.int8",
        ),
    ],
)
def test_refuses_tensors_by_name(
    edited: Callable[..., Path], change: Callable[[dict[str, torch.Tensor]], Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        load(edited(change))


def test_names_a_few_of_many_missing_tensors(edited: Callable[..., Path]) -> None:
    folder = edited(lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers.1" in n])
    with pytest.raises(ValueError, match="and 7 more"):
        load(folder)


def test_refuses_folders_without_weights(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copy(tiny_checkpoint("llama") / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"holds none of model\.safetensors, .*dummy"):
        load(tmp_path)
    (tmp_path / "model.pt").touch()
    with pytest.raises(ValueError, match=r"model\.pt cannot be read under such names"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("{", "is not an index"),
        ('{"metadata": {}}', "is not an index"),
        ('{"weight_map": ["model.norm.weight"]}', "is not an index"),
    ],
)
def test_refuses_a_broken_index(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, index: str, named: str
) -> None:
    shutil.copy(tiny_checkpoint("llama") / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=named):
        load(tmp_path)


def test_refuses_an_index_that_does_not_fit_its_files(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama")
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "part.safetensors")}))
    with pytest.raises(ValueError, match=r"part\.safetensors does not exist"):
        load(tmp_path)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match=r"part\.safetensors lacks tensor model\.norm\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_dummy_weights_need_only_a_config(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, quantization: str | None
) -> None:
    shutil.copy(tiny_checkpoint(family) / "config.json", tmp_path)
    options: dict[str, Any] = {"load_format": "dummy", "quantization": quantization}
    decoder = load(tmp_path, seed=3, **options)
    assert same_weights(decoder, load(tmp_path, seed=3, **options))
    assert not same_weights(decoder, load(tmp_path, seed=4, **options))
    assert decoder.embedding.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(decoder.norm.weight, torch.ones(64))


def test_types(tiny_checkpoint: Callable[..., Path]) -> None:
    config = replace(load_model_config(tiny_checkpoint("llama")), dtype="bfloat16")
    assert resolve_dtype("auto", config, CPU) == torch.float32
    assert resolve_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", config, CPU) == torch.float16


def test_resolves_folders_and_refuses_what_is_none(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    for model, named in (
        (str(tmp_path / "file"), "a file"),
        (str(tmp_path / "absent"), "no such folder"),
        ("./absent", "no such folder"),
        ("a/b/c", "no such folder"),
        ("", "must be a folder"),
        ("no spaces/allowed", "did not give it: HFValidationError"),
    ):
        with pytest.raises(ValueError, match=named):
            resolve_model(model)


def test_a_hub_model_that_is_not_cached_is_refused_offline() -> None:
    with pytest.raises(ValueError, match=r"model is 'coppice-tests/absent'.*hub did not give it"):
        resolve_model("coppice-tests/absent")


def test_fetches_only_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def fetch(repo_id: str, **options: Any) -> str:
        assert repo_id == "owner/name"
        asked.append(options["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model("owner/name") == tmp_path
    assert "*.safetensors" in asked[0]
    assert not any(pattern.endswith(".bin") for pattern in asked[0])
    assert asked[1:] == [["pytorch_model*.bin"]], "where there are no safetensors"
    (tmp_path / "model.safetensors").touch()
    resolve_model("owner/name")
    assert len(asked) == 3, "pickles are left out where there are safetensors"

"""Adapters' files: what their config says, and a clear error for each that can't be used."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import ALL, load, read_changes, save_adapter
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from coppice.runtime.model.adapters.matrices import AdapterFiles, read_adapter
from coppice.runtime.model.adapters.projections import parts_of
from coppice.runtime.model.adapters.settings import read_settings
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.config_file import load_model_config
from tests.runtime.conftest import make_model


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


MATRICES = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Callable[..., Path]) -> PreTrainedModel:
    return load(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Callable[..., Path]) -> ModelConfig:
    return load_model_config(tiny_checkpoint("llama"))


def read(folder: Path, config: ModelConfig, max_rank: int = 64) -> AdapterFiles:
    return read_adapter(folder, config, max_rank)


def changed(folder: Path, **fields: Any) -> Path:
    """Writes fields to an adapter's config; None removes one."""
    file = folder / "adapter_config.json"
    raw = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
    return folder


def product(files: AdapterFiles, name: str, config: ModelConfig) -> torch.Tensor:
    """scale * B A of one projection, as it was read."""
    part = parts_of(config)[name]
    (piece,) = (p for p in files.pieces if (p.part.layer, p.part.projection, p.part.first) ==
                (part.layer, part.projection, part.first))  # fmt: skip
    return piece.up.t() @ piece.down


# -- what a config says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [
        ({}, {}),
        ({"use_rslora": True}, {}),
        ({"alpha_pattern": {"q_proj": 3.0, r"layers\.1\.mlp\.down_proj": 5}}, {}),
        ({"use_rslora": True, "alpha_pattern": {"up_proj": 1}}, {"up_proj": 7, "v_proj": 1}),
    ],
)
def test_scales_and_ranks_are_those_of_the_definition(
    llama: PreTrainedModel, config: ModelConfig, tmp_path: Path, fields: Any, ranks: dict[str, int]
) -> None:
    save_adapter(tmp_path, llama, ranks=ranks, **fields)
    files = read(tmp_path, config)
    settings = read_settings(tmp_path)
    for name, (down, up, _) in read_changes(tmp_path).items():
        rank = len(down)
        alpha = 6.0
        for pattern, value in fields.get("alpha_pattern", {}).items():
            if name.endswith(pattern.replace("\\", "")):
                alpha = value
        scale = alpha / (rank**0.5 if fields.get("use_rslora") else rank)
        assert settings.scale_of(name) == pytest.approx(scale)
        torch.testing.assert_close(product(files, name, config), scale * (up @ down))


def test_targets_by_names_patterns_and_layers(
    llama: PreTrainedModel, config: ModelConfig, tmp_path: Path
) -> None:
    def targets(**fields: Any) -> set[str]:
        settings = read_settings(changed(tmp_path, **fields))
        return {name for name in parts_of(config) if settings.changes(name)}

    save_adapter(tmp_path, llama)
    every = set(parts_of(config))
    assert len(every) == 14
    assert targets() == targets(target_modules="all-linear") == every
    of_q = {f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)}
    assert targets(target_modules=["q_proj"]) == of_q
    assert targets(target_modules=["proj"]) == set()
    pattern = r"model\.layers\.1\..*(q|v)_proj"
    assert targets(target_modules=pattern) == {f"model.layers.1.self_attn.{n}_proj" for n in "qv"}
    assert targets(target_modules=["q_proj"], layers_to_transform=1) == {max(of_q)}
    assert targets(target_modules=["q_proj"], layers_to_transform=[0]) == {min(of_q)}
    assert targets(layers_pattern="layers", layers_to_transform=[0]) == {min(of_q)}
    assert targets(layers_pattern="blocks", layers_to_transform=[0]) == set()
    assert targets(
        layers_pattern=[], layers_to_transform=[], target_modules="all-linear",
        exclude_modules=["q_proj", "down_proj"],
    ) == {name for name in every if not name.endswith(("q_proj", "down_proj"))}  # fmt: skip


def test_a_pickle_is_read_as_safetensors_are(
    llama: PreTrainedModel, config: ModelConfig, tmp_path: Path
) -> None:
    one = read(save_adapter(tmp_path / "a", llama), config)
    other = read(save_adapter(tmp_path / "b", llama, file="adapter_model.bin"), config)
    for ours, theirs in zip(one.pieces, other.pieces, strict=True):
        assert torch.equal(ours.down, theirs.down)
        assert torch.equal(ours.up, theirs.up)


def test_the_digest_is_that_of_all_content(
    llama: PreTrainedModel, config: ModelConfig, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path, llama)
    before = read(folder, config).digest
    assert read(folder, config).digest == before
    assert read(changed(folder, lora_alpha=7), config).digest != before
    changed(folder, lora_alpha=6.0)
    assert read(save_adapter(tmp_path, llama, seed=5), config).digest != before


def test_invocations(llama: PreTrainedModel, config: ModelConfig, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, llama, alora_invocation_tokens=[5, 6])
    assert read(folder, config).invocation == (5, 6)
    with pytest.raises(ValueError, match=r"alora_invocation_tokens must be below 320, .* got 400"):
        read(changed(folder, alora_invocation_tokens=[5, 400]), config)
    for wrong in ([], "token", [-1], [True]):
        with pytest.raises(ValueError, match=r"alora_invocation_tokens must be"):
            read(changed(folder, alora_invocation_tokens=wrong), config)


# -- what is refused -------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported is 'LORA'"),
    ({"bias": "lora_only"}, "bias is 'lora_only'; supported is 'none'"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    ({"use_dora": True}, "use_dora is True; DoRA is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is True; adapters with it are not supported"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
    ({"target_parameters": ["experts.down"]}, "target_parameters is"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"r": 0}, "r must be an integer of at least 1, got 0"),
    ({"lora_alpha": "x"}, "lora_alpha must be a number, got 'x'"),
    ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    ({"target_modules": None}, "target_modules must name the projections, got None"),
    ({"target_modules": "("}, "unterminated|missing"),
    ({"target_modules": ["attention"]}, "unexpected tensors"),
    ({"target_modules": ["q_proj"]}, "has unexpected tensors, of model.layers.0.mlp.down_proj"),
    ({"r": 5}, r"lora_A.weight has shape \(4, 64\); .* ask for \(5, 64\)"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_configs_that_are_refused_by_name(
    llama: PreTrainedModel, config: ModelConfig, tmp_path: Path, fields: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(changed(save_adapter(tmp_path, llama), **fields), config)
    assert str(tmp_path) in str(caught.value)


def test_a_rank_above_the_limit(
    llama: PreTrainedModel, config: ModelConfig, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path, llama, ranks={"q_proj": 9})
    assert len(read(folder, config, 9).pieces) == 14
    with pytest.raises(ValueError, match=r"q_proj .* at most max_lora_rank, 8, got 9"):
        read(folder, config, 8)


def test_adapters_of_other_models(
    llama: PreTrainedModel, config: ModelConfig, tmp_path: Path
) -> None:
    wide = save_adapter(tmp_path / "wide", make_model("llama", hidden_size=32))
    with pytest.raises(ValueError, match=r"q_proj.lora_A.weight has shape \(4, 32\); .*\(4, 64\)"):
        read(wide, config)
    deep = save_adapter(tmp_path / "deep", make_model("llama", num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM with 2 layers, has no such projection"):
        read(deep, config)
    fused = save_adapter(tmp_path / "fused", make_model("phi3"))
    with pytest.raises(ValueError, match=r"_proj.lora_A.weight: this model, .* no such"):
        read(fused, config)


def test_parts_that_can_not_be_adapted_are_refused_by_name(
    llama: PreTrainedModel, config: ModelConfig, tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
) -> None:  # fmt: skip
    head = save_adapter(tmp_path / "head", llama, targets=[*ALL, "lm_head"])
    with pytest.raises(ValueError, match=r"lm_head.lora_A.weight: the embedding and the language"):
        read(head, config)
    folder = save_adapter(tmp_path / "more", llama)
    tensors = load_file(folder / MATRICES)
    for name, message in (
        ("base_model.model.model.embed_tokens.lora_embedding_A", r"\(of the embedding\)"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector", r"\(DoRA\)"),
        ("base_model.model.lm_head.weight", "is not supported"),
    ):
        save_file(tensors | {name: torch.zeros(4, 4)}, folder / MATRICES)
        with pytest.raises(ValueError, match=message):
            read(folder, config)
    path = tiny_checkpoint("qwen3_moe")
    for name in ("mlp.experts.2.up_proj", "mlp.gate", "mlp.experts.base_layer"):
        whole = f"base_model.model.model.layers.0.{name}.lora_A.weight"
        save_file({whole: torch.zeros(4, 4)}, folder / MATRICES)
        with pytest.raises(ValueError, match=r"experts and their router can't be adapted here"):
            read(folder, load_model_config(path))


def test_files_that_can_not_be_read(
    llama: PreTrainedModel, config: ModelConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"is not the folder of an adapter: .*adapter_config.json"):
        read(tmp_path, config)
    folder = save_adapter(tmp_path, llama)
    matrices, settings = folder / MATRICES, folder / "adapter_config.json"
    whole, said = matrices.read_bytes(), settings.read_text()
    for content in (whole[:-100], whole[:20], b"", b"x" * 64):
        matrices.write_bytes(content)
        with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read"):
            read(folder, config)
    matrices.unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model.safetensors or adapter"):
        read(folder, config)
    pickled = folder / "adapter_model.bin"
    for content in (b"", b"\x80\x04cos\nsystem\n", whole):
        pickled.write_bytes(content)
        with pytest.raises(ValueError, match=r"adapter_model.bin cannot be read"):
            read(folder, config)
    made = tmp_path / "made by a pickle"
    pickled.write_bytes(pickle.dumps(Trap(str(made))))
    with pytest.raises(ValueError, match=r"adapter_model.bin cannot be read"):
        read(folder, config)
    assert not made.exists(), "code of a pickle ran"
    torch.save([1, 2], pickled)
    with pytest.raises(ValueError, match=r"must hold tensors by their names"):
        read(folder, config)
    for text in ("{", "[]", said.replace("{", "\ud800{", 1).encode("utf-8", "surrogatepass")):
        settings.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=r"adapter_config.json"):
            read(folder, config)


def test_tensors_that_are_missing_or_not_numbers(
    llama: PreTrainedModel, config: ModelConfig, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path, llama)
    whole = load_file(folder / MATRICES)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    save_file({n: t for n, t in whole.items() if n != name}, folder / MATRICES)
    with pytest.raises(ValueError, match=r"lacks tensors: .*layers.1.mlp.up_proj.lora_B.weight"):
        read(folder, config)
    for tensor, message in (
        (torch.full_like(whole[name], torch.nan), "infinite or NaN"),
        (whole[name].to(torch.int32), "is torch.int32; supported are float32"),
    ):
        save_file(whole | {name: tensor}, folder / MATRICES)
        with pytest.raises(ValueError, match=message):
            read(folder, config)


def test_an_adapter_that_names_nothing_here(config: ModelConfig, tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["c_attn"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    save_file({}, tmp_path / MATRICES)
    with pytest.raises(ValueError, match=r"names no projection of this model, LlamaForCausalLM"):
        read(tmp_path, config)

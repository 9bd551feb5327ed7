"""How weights of transformers' models are kept, and what else they make than text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification

from coppice.runtime.model.layers import Linear, RMSNorm
from coppice.runtime.model.linear.eight_bit import Int8Linear
from coppice.runtime.model.linear.sixteen_bit import BFloat16Linear, HalfLinear
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.transformers.fuse import GatedPart
from tests.runtime.engine.test_families import generated, run, start
from tests.runtime.model.reading.test_pooling import pooled

Make = Callable[..., Path]


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_16_bits_stay_so_and_are_computed_in_float32(
    foreign_checkpoint: Make, tied: bool
) -> None:
    path = foreign_checkpoint("stablelm", dtype="bfloat16", tie_word_embeddings=tied)
    engine = start(path, page_size=7, dtype="float32")
    linears = [m for m in engine.runner.decoder.modules() if isinstance(m, Linear)]
    assert {type(each) for each in linears} == {HalfLinear}
    assert len(linears) == 2 * 6 + 1
    embeddings = [p for p in engine.runner.decoder.parameters() if p.shape == (320, 64)]
    assert [each.dtype for each in embeddings] == [torch.bfloat16] * (not tied)
    assert run(engine) == generated(path)


def test_products_of_bfloat16_take_every_linear_layer(foreign_checkpoint: Make) -> None:
    """In the recorded pass, whose results do not depend on pages or on what was cached."""
    path = foreign_checkpoint("starcoder2")
    engine = start(path, dtype="bfloat16", page_size=7)
    linears = [m for m in engine.runner.decoder.modules() if isinstance(m, Linear)]
    assert {type(each) for each in linears} == {BFloat16Linear}
    assert len(linears) == 2 * 6 + 1
    tokens = run(engine)
    assert run(engine) == tokens
    assert run(start(path, dtype="bfloat16", page_size=16)) == tokens


@pytest.mark.parametrize("tied", [False, True])
def test_int8_takes_every_linear_layer(foreign_checkpoint: Make, tied: bool) -> None:
    path = foreign_checkpoint("gpt2", tie_word_embeddings=tied)
    engine = start(path, quantization="int8")
    linears = [m for m in engine.runner.decoder.modules() if isinstance(m, Linear)]
    assert {type(each) for each in linears} == {Int8Linear}
    assert len(linears) == 2 * 4 + 1


@pytest.mark.parametrize("tied", [False, True])
def test_int4_takes_every_linear_layer_but_the_head(foreign_checkpoint: Make, tied: bool) -> None:
    path = foreign_checkpoint("gpt2", tie_word_embeddings=tied)
    engine = start(path, quantization="int4")
    linears = [type(m) for m in engine.runner.decoder.modules() if isinstance(m, Linear)]
    assert sorted(each.__name__ for each in linears) == ["Int4Linear"] * 8 + ["Int8Linear"]
    tokens = run(engine)
    assert run(engine) == tokens


@pytest.mark.parametrize(
    ("family", "norms", "gated"),
    [("seed_oss", 5, 2), ("vaultgemma", 5, 0), ("apertus", 9, 0), ("stablelm", 0, 2)],
)
def test_parts_that_compute_what_ours_do_are_ours(
    foreign_checkpoint: Make, family: str, norms: int, gated: int
) -> None:
    """SiLU gates only, and norms of which those of Gemma add 1 to their weights."""
    modules = list(start(foreign_checkpoint(family)).runner.decoder.modules())
    assert sum(type(each) is RMSNorm for each in modules) == norms
    assert sum(type(each) is GatedPart for each in modules) == gated


def test_a_pickled_checkpoint_runs_and_one_with_code_is_refused(
    foreign_checkpoint: Make, tmp_path: Path
) -> None:
    path = foreign_checkpoint("gpt2")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    torch.save(load_file(path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert run(start(tmp_path)) == generated(path)
    torch.save({"wte.weight": Linear}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle that calls code"):
        start(tmp_path)


def test_gguf_is_refused_with_what_to_do(foreign_checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((foreign_checkpoint("gpt2") / "config.json").read_text())
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="holds GGUF, which our own families read"):
        start(tmp_path)


def test_an_engine_sleeps_and_wakes_up(foreign_checkpoint: Make) -> None:
    path = foreign_checkpoint("gpt2")
    engine, expected = start(path, page_size=7), generated(path)
    for level in (1, 2):
        assert run(engine) == expected
        engine.sleep(level)
        engine.wake_up()
    assert run(engine) == expected


def test_random_weights_need_no_files_but_the_config(
    foreign_checkpoint: Make, tmp_path: Path
) -> None:
    config = (foreign_checkpoint("phi") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    one, same = (run(start(tmp_path, load_format="dummy", seed=3)) for _ in range(2))
    assert one == same != run(start(tmp_path, load_format="dummy", seed=4))


@torch.no_grad()
def test_vectors_and_scores_equal_transformers(foreign_checkpoint: Make) -> None:
    prompts = [[5, 9, 200, 31, 8, 77], [5, 9, 200, 31, 40]]
    raw = PoolingParams(use_activation=False)
    path = foreign_checkpoint("starcoder2", auto_class=AutoModel)
    engine, model = start(path, page_size=4), AutoModel.from_pretrained(path).eval()
    for _ in range(2):  # cold and warm
        for found, prompt in zip(pooled(engine, prompts, raw), prompts, strict=True):
            expected = model(torch.tensor([prompt])).last_hidden_state[0, -1]
            assert found.pooled is not None
            torch.testing.assert_close(torch.from_numpy(found.pooled), expected, atol=1e-3, rtol=0)
    auto_class = AutoModelForSequenceClassification
    path = foreign_checkpoint("phi", auto_class=auto_class, pad_token_id=0, num_labels=3)
    engine = start(path, page_size=4)
    classifier = auto_class.from_pretrained(path).eval()
    score = PoolingParams("score", use_activation=False)
    for found, prompt in zip(pooled(engine, prompts, score), prompts, strict=True):
        expected = classifier(torch.tensor([prompt])).logits[0]
        assert found.pooled is not None
        torch.testing.assert_close(torch.from_numpy(found.pooled), expected, atol=1e-3, rtol=0)

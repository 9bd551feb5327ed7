"""Ranks of checkpoints that are stored in fewer bits, and what else requests may ask of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from needed_products import needs_products
from quantised_files import CASES, write_quantised
from transformers import AutoModelForCausalLM

from coppice.runtime.engine.core import Engine
from coppice.runtime.model.files.path import resolve_model
from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.runtime.engine.test_grammar_drafts import JSON, REGEX
from tests.runtime.engine.test_grammar_drafts import checkpoint as bytes_checkpoint  # noqa: F401
from tests.runtime.model.reading.conftest import embedder  # noqa: F401
from tests.runtime.model.reading.test_pooling import make_prompts, pooled, vectors
from tests.runtime.runner.ranks.conftest import StartRanks
from tests.runtime.runner.ranks.test_equal import scores

Checkpoint = Callable[..., Path]
# In groups of 32, inputs of a rank are whole ones; heads have 32 numbers.
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 32}


def same_scores(
    start: StartRanks, path: Path, ranks: int, near: float = 0.25, **options: object
) -> None:
    """Ranks score a prompt as one does, but for rows that are rounded to 8 bits otherwise."""
    alone, several = (scores(start(path, each, **options)) for each in (1, ranks))
    apart = np.abs(alone - several)
    assert apart.max() < near
    assert np.median(apart) < near / 4, "most are much nearer"
    assert alone.std() > 2 * near, "tokens differ by more"


@needs_products("int4")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_ranks_read_quantised_checkpoints(
    tiny_checkpoint: Checkpoint,
    start_threads: StartRanks,
    tmp_path: Path,
    case: str,
    ranks: int,
) -> None:
    folder, _ = write_quantised(tiny_checkpoint("llama", **SIZES), case, tmp_path)
    # Of whole rows the scale is that of the numbers that a rank has; of groups it is the same.
    whole_rows = case.startswith(("w8a8", "fp8"))
    same_scores(start_threads, folder, ranks, 1.0 if whole_rows else 0.25)


@needs_products("int4")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
def test_ranks_read_gguf_files(
    tiny_checkpoint: Checkpoint,
    start_threads: StartRanks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    from gguf_writing import write_gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama", **sizes))
    write_gguf(model, tmp_path / "model.gguf", kind)
    folder = resolve_model(str(tmp_path / "model.gguf"))
    same_scores(start_threads, folder, 2)


@needs_products("int4")
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4"}])
def test_ranks_have_parts_of_experts_in_few_bits(
    tiny_checkpoint: Checkpoint, start_threads: StartRanks, options: dict[str, object]
) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
    path = tiny_checkpoint("qwen3_moe", **sizes)
    same_scores(start_threads, path, 2, 0.8, **options)


def test_ranks_pool_prompts(embedder: Checkpoint, start_threads: StartRanks) -> None:  # noqa: F811
    path, asked = embedder("qwen3"), make_prompts()
    alone, several = (
        vectors(pooled(start_threads(path, each), asked, PoolingParams())) for each in (1, 3)
    )
    np.testing.assert_allclose(several, alone, atol=1e-5)


def test_ranks_follow_forms(bytes_checkpoint: Path, start_threads: StartRanks) -> None:  # noqa: F811
    """The first one alone has the grammars, which mask logits that are gathered from all."""

    def answers(engine: Engine) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, form in enumerate((JSON, REGEX)):
            params = SamplingParams(temperature=0, max_tokens=120, structured_outputs=form)
            engine.add_request(str(number), [5, 6, 7], params)
        while engine.has_unfinished():
            for output in engine.step():
                assert output.error is None, output.error
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
        return found

    alone, several = (answers(start_threads(bytes_checkpoint, each)) for each in (1, 3))
    assert several == alone and len(alone) == 2

"""Adapters in the Python API, for one thread and for coroutines."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
import torch
from adapter_files import greedy_by, load, merged, save_adapter

from coppice import LLM, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams, Session
from coppice.frontend.text.engine import TextEngine
from coppice.runtime.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from coppice.frontend.client.engine import EngineClient
    from tests.frontend.conftest import LiveServer

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PROMPT = [9, 8, 7, 60, 61, 62, 63]


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    folder = tmp_path_factory.mktemp("adapter")
    return LoRARequest("french", 1, str(save_adapter(folder, load(checkpoint))))


@pytest.fixture(scope="module")
def expected(checkpoint: Path, adapter: LoRARequest) -> tuple[list[int], list[int]]:
    """Tokens of the base model, and of the adapter."""
    base = greedy_by(load(checkpoint), PROMPT, 5)
    own = greedy_by(merged(checkpoint, Path(adapter.lora_path)), PROMPT, 5)
    assert base != own
    return base, own


def test_prompts_of_one_call_have_adapters_of_their_own(
    checkpoint: Path, adapter: LoRARequest, expected: tuple[list[int], list[int]]
) -> None:
    llm = LLM(str(checkpoint), kv_cache_tokens=1024, max_num_seqs=4, enable_lora=True)
    base, own = expected
    both = llm.generate([PROMPT, PROMPT], GREEDY, lora_request=[None, adapter])
    assert [list(output.outputs[0].token_ids) for output in both] == [base, own]
    one = llm.generate([PROMPT, PROMPT], GREEDY, lora_request=adapter)
    assert [list(output.outputs[0].token_ids) for output in one] == [own, own]
    assert llm.list_loras() == [adapter]
    beams = llm.beam_search(PROMPT, BeamSearchParams(1, 5, ignore_eos=True), lora_request=adapter)
    assert list(beams[0].sequences[0].tokens[-5:]) == own
    turns = [{"role": "user", "content": "The key"}]
    answers = [llm.chat(turns, GREEDY, lora_request=each)[0] for each in (None, adapter)]
    assert answers[0].outputs[0] != answers[1].outputs[0]
    with pytest.raises(ValueError, match="one for each of the 2 prompts"):
        llm.generate([PROMPT, PROMPT], GREEDY, lora_request=[adapter])
    with pytest.raises(ValueError, match="must be a LoRARequest or None, got 'french'"):
        llm.generate([PROMPT], GREEDY, lora_request=["french"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"prompts\[0\]: lora_path: it is '/none'"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("other", 2, "/none"))
    llm.remove_lora("french")
    assert llm.list_loras() == []
    llm.add_lora(adapter)
    assert list(llm.generate(PROMPT, GREEDY, lora_request=adapter)[0].outputs[0].token_ids) == own
    llm.shutdown()


def test_coroutines(
    text_engine_with_adapters: TextEngine,
    engine_client: Callable[..., EngineClient],
    adapter: LoRARequest,
    expected: tuple[list[int], list[int]],
    checkpoint: Path,
) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(checkpoint), kv_cache_tokens=1024, enable_lora=True)
        llm._engine = engine_client(text_engine_with_adapters)

        async def tokens(asked: LoRARequest | None) -> list[int]:
            found: list[int] = []
            async for output in llm.generate(PROMPT, GREEDY, lora_request=asked):
                found = list(output.outputs[0].token_ids)
            return found

        both = await asyncio.gather(tokens(None), tokens(adapter))
        assert both == list(expected)
        await llm.remove_lora("french")
        assert await llm.list_loras() == []
        await llm.add_lora(adapter)
        assert await llm.list_loras() == [adapter]
        with pytest.raises(ValueError, match="must be a LoRARequest or None"):
            await tokens("french")  # type: ignore[arg-type]
        await llm.shutdown()

    asyncio.run(main())


@pytest.fixture
def text_engine_with_adapters(checkpoint: Path) -> TextEngine:
    return TextEngine.load(
        EngineConfig(model=str(checkpoint), kv_cache_tokens=1024, max_num_seqs=4, enable_lora=True)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", 1, "a"), "lora_name must be a text that is not empty, got ''"),
        (("a", 0, "a"), "lora_int_id must be an integer of at least 1, got 0"),
        (("a", True, "a"), "lora_int_id must be"),
        (("a", 1, " "), "lora_path must be"),
    ],
)
def test_requests_that_are_refused(fields: tuple[str, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRARequest(*fields)


def test_a_session_of_an_adapter(
    checkpoint: Path, adapter: LoRARequest, expected: tuple[list[int], list[int]]
) -> None:
    llm = LLM(str(checkpoint), kv_cache_tokens=1024, max_num_seqs=4, enable_lora=True)
    prompt = {"prompt_token_ids": PROMPT}
    with llm.session(prompt) as plain, llm.session(prompt, lora_request=adapter) as french:
        (branch,) = french.fork()
        Session.generate_all([plain, french, branch], GREEDY)
        made = [list(each.token_ids[len(PROMPT) :]) for each in (plain, french, branch)]
        assert made == [expected[0], expected[1], expected[1]]
        assert plain.score(" key") != french.score(" key") == branch.score(" key")
        (found,) = (each for each in llm.cache_report().adapters)
        assert (found.name, found.requests) == ("french", 4)
        assert found.hit_tokens > 3 * len(PROMPT)
        branch.close()
    with pytest.raises(ValueError, match="must be a LoRARequest or None, got 'french'"):
        llm.session(prompt, lora_request="french")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lora_path: it is '/none'"):
        llm.session("", lora_request=LoRARequest("other", 2, "/none"))
    llm.shutdown()


@pytest.fixture
def embedder(checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint as a model of vectors: those of the last token."""
    path = tmp_path / "embedder"
    shutil.copytree(checkpoint, path)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"s.{kind}", "path": "1_Pooling" * (kind == "Pooling")} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return path


def test_vectors_and_scores_of_an_adapter(
    embedder: Path,
    checkpoint: Path,
    adapter: LoRARequest,
    live_server: type[LiveServer],
    engine_client: Callable[..., EngineClient],
) -> None:
    """They are those of the merged model, in Python, for coroutines and over HTTP."""

    def reference(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(hidden, dim=0).numpy()

    llm = LLM(str(embedder), kv_cache_tokens=1024, max_num_seqs=4, enable_lora=True)
    ids = [PROMPT, [9, 8, 7, 70]]
    own = merged(checkpoint, Path(adapter.lora_path))
    expected = [reference(load(checkpoint), ids[0]), *(reference(own, each) for each in ids)]
    prompts = [{"prompt_token_ids": each} for each in (ids[0], *ids)]
    made = llm.embed(prompts, use_tqdm=False, lora_request=[None, adapter, adapter])
    for output, vector in zip(made, expected, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-4)
    texts = ("The key", "the mat")
    vectors = [reference(own, llm.get_tokenizer().encode(text)) for text in texts]
    (score,) = llm.score(*texts, use_tqdm=False, lora_request=adapter)
    assert score.outputs.score == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-4)
    assert llm.score(*texts, use_tqdm=False)[0].outputs.score != score.outputs.score
    for wrong in ("french", 3):
        with pytest.raises(ValueError, match="lora_request must be"):
            llm.embed(prompts, lora_request=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="lora_request must be a LoRARequest or None"):
            llm.score("a", "b", lora_request=wrong)  # type: ignore[arg-type]

    async def coroutines() -> None:
        other = AsyncLLM(str(embedder), kv_cache_tokens=1024, enable_lora=True)
        other._engine = engine_client(llm._text_engine)
        outputs = await other.embed(prompts[1:], lora_request=adapter)
        for output, vector in zip(outputs, expected[1:], strict=True):
            np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-4)
        (again,) = await other.score(*texts, lora_request=adapter)
        assert again.outputs.score == pytest.approx(score.outputs.score)
        await other.remove_lora("french")
        await other.shutdown()

    asyncio.run(coroutines())
    engine = TextEngine.load(
        EngineConfig(str(embedder), kv_cache_tokens=1024, max_num_seqs=4, enable_lora=True)
    )
    server = live_server(engine, lora_modules=(f"french={adapter.lora_path}",))
    try:
        body = {"model": "french", "input": ids}
        answer = httpx.post(server.url + "/v1/embeddings", json=body).json()
        assert answer["model"] == "french"
        for each, vector in zip(answer["data"], expected[1:], strict=True):
            np.testing.assert_allclose(each["embedding"], vector, atol=1e-4)
        for path in ("/score", "/rerank"):
            both = {"text_1": texts[0], "text_2": texts[1]}
            if path == "/rerank":
                both = {"query": texts[0], "documents": [texts[1]]}  # type: ignore[dict-item]
            found = httpx.post(server.url + path, json={"model": "french"} | both).json()
            number = found["data"][0]["score"] if "data" in found else None
            number = number or found["results"][0]["relevance_score"]
            assert number == pytest.approx(score.outputs.score, abs=1e-5)
    finally:
        server.close()

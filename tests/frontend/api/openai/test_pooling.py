"""Embeddings, score and rerank over HTTP, and in Python."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from coppice.frontend.api.openai.pooling import routes
from coppice.frontend.http import json_answers
from coppice.frontend.python import async_llm
from coppice.frontend.python.async_llm import AsyncLLM
from coppice.frontend.python.llm import LLM
from coppice.frontend.text.engine import TextEngine
from coppice.runtime.config import EngineConfig
from coppice.runtime.requests.pooling_params import PoolingParams
from tests.frontend.conftest import EngineInThread

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

TEXTS = ["Instruct: find it. The key is under the mat", "Instruct: find it. The band plays on"]
Serve = Callable[..., Any]


@pytest.fixture(scope="session")
def embedder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as an embedder, whose tokenizer ends a text as Qwen3-Embedding's does."""
    path = tmp_path_factory.mktemp("embedder") / "model"
    shutil.copytree(checkpoint, path)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"s.{k}", "path": "1_Pooling" if k == "Pooling" else ""} for k in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"is_matryoshka": True}))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    end = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [1], "tokens": ["<|end|>"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.fixture(scope="session")
def reranker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as a reranker by two tokens, with a template for its pairs."""
    path = tmp_path_factory.mktemp("reranker") / "model"
    shutil.copytree(checkpoint, path)
    config = json.loads((path / "config.json").read_text())
    config["classifier_from_token"] = ["o", "e"]
    (path / "config.json").write_text(json.dumps(config))
    template = (
        "{% for m in messages %}{% if m.role == 'query' %}Q: {{ m.content }}"
        "{% elif m.role == 'document' %} D: {{ m.content }}{% endif %}{% endfor %}?"
    )
    for file in path.glob("chat_template*"):
        file.unlink()
    named = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(named | {"chat_template": template}))
    return path


@pytest.fixture(scope="module")
def served_at(live_server: type[LiveServer]) -> Serve:
    @contextmanager
    def serve(path: Path, **more: Any) -> Iterator[httpx.Client]:
        config = EngineConfig(model=str(path), kv_cache_tokens=4096, max_num_seqs=8, **more)
        server = live_server(TextEngine.load(config))
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client
        server.until_idle()
        server.close()

    return serve


@torch.no_grad()
def vector(path: Path, text: str) -> np.ndarray:
    """transformers' vector of a text."""
    ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")["input_ids"]
    state = AutoModel.from_pretrained(path).eval()(ids).last_hidden_state[0, -1]
    return np.asarray(state / state.norm())


def ok(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_embeddings(embedder: Path, served_at: Serve) -> None:
    wanted = [vector(embedder, text) for text in TEXTS]
    with served_at(embedder) as http:
        first = ok(http, "/v1/embeddings", input=TEXTS)
        assert [each["index"] for each in first["data"]] == [0, 1]
        again = ok(http, "/v1/embeddings", input=TEXTS, encoding_format="base64", model="tiny")
        for cold, warm, vector_ in zip(first["data"], again["data"], wanted, strict=True):
            np.testing.assert_allclose(cold["embedding"], vector_, atol=1e-5)
            found = np.frombuffer(base64.b64decode(warm["embedding"]), "<f4")
            np.testing.assert_allclose(found, vector_, atol=1e-5)
        usage = again["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 2
        short = ok(http, "/v1/embeddings", input=TEXTS[0], dimensions=8)["data"][0]["embedding"]
        expected = wanted[0][:8] / np.linalg.norm(wanted[0][:8])
        np.testing.assert_allclose(short, expected, atol=1e-5)
        ids = ok(http, "/tokenize", prompt=TEXTS[0])["tokens"]
        for given in (ids, [ids]):
            same = ok(http, "/v1/embeddings", input=given)["data"][0]["embedding"]
            np.testing.assert_allclose(same, wanted[0], atol=1e-5)
        cut = ok(http, "/v1/embeddings", input=TEXTS[0], truncate_prompt_tokens=5)
        assert cut["usage"]["prompt_tokens"] == 5
        kept = ok(http, "/v1/embeddings", input=[*ids[:4], ids[-1]])
        assert cut["data"][0]["embedding"] == pytest.approx(kept["data"][0]["embedding"], abs=1e-5)
        for body, param in (
            ({"input": []}, "input"),
            ({"input": "x", "dimensions": 99}, "dimensions"),
            ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"input": [1] * 600}, "input"),
        ):
            answer = http.post("/v1/embeddings", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
        code = http.post("/v1/embeddings", json={"input": [1] * 600}).json()["error"]["code"]
        assert code == "context_length_exceeded"
        cosine = float(np.dot(*wanted))
        scores = ok(http, "/score", text_1=TEXTS[0], text_2=[TEXTS[1], TEXTS[0]])["data"]
        assert [each["score"] for each in scores] == pytest.approx([cosine, 1.0], abs=1e-5)


def test_rerank_by_two_tokens(reranker: Path, served_at: Serve) -> None:
    documents = ["The key", "The band plays", "Straße and numbers"]
    with served_at(reranker) as http:
        scores = ok(http, "/v1/score", queries="Where?", documents=documents)
        by_logits = []
        for document in documents:
            made = ok(
                http, "/v1/completions", prompt=f"Q: Where? D: {document}?", max_tokens=1,
                temperature=0, logprobs=20,
            )  # fmt: skip
            by_logits.append(made["choices"][0]["logprobs"]["top_logprobs"][0])
        for each, top in zip(scores["data"], by_logits, strict=True):
            assert 0 < each["score"] < 1
            if {"e", "o"} <= {*top}:
                odds = top["e"] - top["o"]
                assert each["score"] == pytest.approx(1 / (1 + np.exp(-odds)), abs=1e-4)
        best = sorted(scores["data"], key=lambda each: -each["score"])
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            results = ok(http, path, query="Where?", documents=documents, top_n=2)["results"]
            assert [each["index"] for each in results] == [each["index"] for each in best[:2]]
            assert results[0]["document"]["text"] == documents[results[0]["index"]]
            assert results[0]["relevance_score"] == pytest.approx(best[0]["score"], abs=1e-5)
        plain = ok(http, "/rerank", query="a", documents=["b"], return_documents=False)
        assert "document" not in plain["results"][0]
        long = ok(
            http, "/rerank", query="a", documents=["the key " * 900], truncate_prompt_tokens=30
        )
        assert long["usage"]["prompt_tokens"] <= 30
        answer = http.post("/v1/embeddings", json={"input": "x"})
        assert answer.status_code == 400
        assert "embed is not what this model is made for" in answer.json()["error"]["message"]
        for body, param in (
            ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_2"),
            ({"text_1": "a"}, "text_2"),
            ({"queries": "a", "documents": "b", "text_1": "c"}, "text_1"),
        ):
            answer = http.post("/score", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_many_numbers_are_written_outside_the_event_loop(
    embedder: Path, served_at: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of vectors, and those of which scores are made; a few are written on it."""
    threads: set[str] = set()
    numbers = routes._numbers

    def noted(output: Any) -> list[float]:
        threads.add(threading.current_thread().name)
        return numbers(output)

    monkeypatch.setattr(routes, "_numbers", noted)
    with served_at(embedder) as http:
        asked: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/v1/embeddings", {"input": TEXTS * 4}),
            ("/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
            ("/rerank", {"query": TEXTS[0], "documents": TEXTS}),
        )
        for path, body in asked:
            threads.clear()
            few = ok(http, path, **body)
            assert not any(each.startswith("coppice-answers") for each in threads)
            threads.clear()
            with monkeypatch.context() as patch:
                patch.setattr(json_answers, "LARGE_VALUES", 2 * 32)
                many = ok(http, path, **body)
            assert threads
            assert all(each.startswith("coppice-answers") for each in threads), path
            assert few.keys() == many.keys()


def test_a_model_for_text_refuses_by_name(checkpoint: Path, served_at: Serve) -> None:
    with served_at(checkpoint) as http:
        for path, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert "is not what this model is made for: it has n" in answer.text


def test_in_python(embedder: Path, reranker: Path, checkpoint: Path) -> None:
    wanted = [vector(embedder, text) for text in TEXTS]
    with LLM(str(embedder), kv_cache_tokens=4096) as llm:
        for _ in ("cold", "warm"):
            outputs = llm.embed(TEXTS, use_tqdm=False)
            for output, vector_ in zip(outputs, wanted, strict=True):
                np.testing.assert_allclose(output.outputs.embedding, vector_, atol=1e-5)
        assert all(each.cached_tokens == len(each.prompt_token_ids) - 1 for each in outputs)
        (pair,) = llm.score(*TEXTS, use_tqdm=False)
        assert pair.outputs.score == pytest.approx(float(np.dot(*wanted)), abs=1e-5)
        with pytest.raises(ValueError, match=r"prompts\[0\]: dimensions"):
            llm.embed("x", pooling_params=PoolingParams(dimensions=99))
        assert len(llm.generate("x", use_tqdm=False)) == 1
    with LLM(str(reranker), kv_cache_tokens=4096) as llm:
        found = llm.score("Where?", ["The key", "A band"], use_tqdm=False)
        assert all(0 < each.outputs.score < 1 for each in found)
        raw = llm.score("Where?", ["The key", "A band"], use_tqdm=False, use_activation=False)
        for each, plain in zip(found, raw, strict=True):
            expected = 1 / (1 + np.exp(-plain.outputs.score))
            assert each.outputs.score == pytest.approx(expected, abs=1e-5)
    with LLM(str(checkpoint), kv_cache_tokens=4096) as llm:
        for call in (lambda: llm.embed("x"), lambda: llm.score("a", "b")):
            with pytest.raises(ValueError, match="is not what this model is made for"):
                call()


async def test_in_python_for_coroutines(
    embedder: Path, reranker: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        async_llm,
        "EngineProcess",
        lambda config, **_: EngineInThread(TextEngine.load(config)),
    )
    async with AsyncLLM(str(embedder), kv_cache_tokens=4096) as llm:
        salted: list[Any] = [TEXTS[0], {"prompt": TEXTS[1], "cache_salt": "a"}, TEXTS[0]]
        outputs = await llm.embed(salted)
        for output, text in zip(outputs, (*TEXTS, TEXTS[0]), strict=True):
            np.testing.assert_allclose(output.outputs.embedding, vector(embedder, text), atol=1e-5)
        (pair,) = await llm.score(*TEXTS)
        expected = float(np.dot(*(vector(embedder, text) for text in TEXTS)))
        assert pair.outputs.score == pytest.approx(expected, abs=1e-5)
        with pytest.raises(ValueError, match="dimensions"):
            await llm.embed("x", pooling_params=PoolingParams(dimensions=99))
    async with AsyncLLM(str(reranker), kv_cache_tokens=4096) as llm:
        raw = await llm.score("Where?", ["The key", "A band"], use_activation=False)
        found = await llm.score("Where?", ["The key", "A band"])
        for each, plain in zip(found, raw, strict=True):
            expected = 1 / (1 + np.exp(-plain.outputs.score))
            assert each.outputs.score == pytest.approx(expected, abs=1e-5)
    async with AsyncLLM(str(checkpoint), kv_cache_tokens=4096) as llm:
        for call in (llm.embed("x"), llm.score("a", "b")):
            with pytest.raises(ValueError, match="is not what this model is made for"):
                await call

"""Adapters of a server: those it starts with, and those that are loaded while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest
from adapter_files import load, save_adapter
from prometheus_client.parser import text_string_to_metric_families
from transformers import LlamaConfig, LlamaForCausalLM

from coppice.frontend.http.lora_modules import Module, all_modules
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.report.encode import report_schema
from coppice.frontend.text.engine import TextEngine
from coppice.runtime.config import EngineConfig

if TYPE_CHECKING:
    from tests.frontend.conftest import LiveServer

PROMPT = list(range(20, 60))
INVOCATION = [70, 71]


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, folder = load(checkpoint), tmp_path_factory.mktemp("adapters")
    made = {name: save_adapter(folder / name, model, seed=n) for n, name in enumerate("abc")}
    made["judge"] = save_adapter(
        folder / "judge", model, seed=9, alora_invocation_tokens=INVOCATION
    )
    return made


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, folders: dict[str, Path], live_server: type[LiveServer]
) -> Iterator[LiveServer]:
    config = EngineConfig(
        model=str(checkpoint), kv_cache_tokens=4096, max_num_seqs=8, enable_lora=True, max_loras=3,
        max_lora_rank=8,
    )  # fmt: skip
    module = json.dumps({"name": "judge", "path": str(folders["judge"]), "base_model_name": "tiny"})
    made = live_server(
        TextEngine.load(config),
        lora_modules=(f"a={folders['a']}", module),
        api_key=("ann=k",),
        admin_api_key=("root=r",),
        isolate_keys=False,
    )
    yield made
    made.until_idle()
    made.close()


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=server.url, timeout=60, headers={"Authorization": "Bearer r"}
    ) as client:
        yield client


def complete(http: httpx.Client, model: str, prompt: list[int] = PROMPT, **more: Any) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    answer = http.post("/v1/completions", json=body | {"return_token_ids": True} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def cached(answer: Any) -> int:
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def refused(http: httpx.Client, status: int, path: str, **body: Any) -> str:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def test_adapters_are_models_with_a_parent(http: httpx.Client, folders: dict[str, Path]) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert list(cards) == ["tiny", "a", "judge"]
    assert cards["tiny"]["parent"] is None
    assert (cards["a"]["parent"], cards["a"]["root"]) == ("tiny", str(folders["a"]))
    assert http.get("/v1/models/judge").json()["parent"] == "tiny"
    base, own = complete(http, "tiny"), complete(http, "a")
    assert (base["model"], own["model"]) == ("tiny", "a")
    assert tokens(base) != tokens(own)
    assert cached(complete(http, "a")) == len(PROMPT) - 1
    message = {"messages": [{"role": "user", "content": "The key"}], "max_tokens": 3}
    chats = [
        http.post("/v1/chat/completions", json=message | {"model": name}).json()
        for name in ("tiny", "a")
    ]
    assert [chat["model"] for chat in chats] == ["tiny", "a"]
    rendered = http.post("/v1/completions/render", json={"model": "a", "prompt": PROMPT}).json()
    assert rendered["prompts"][0]["cached_tokens"] == len(PROMPT) - 1
    refused(http, 404, "/v1/completions", model="nobody", prompt="x")


def test_an_invoked_adapter_hits_what_the_base_has_cached(http: httpx.Client) -> None:
    prompt = list(range(100, 133))
    complete(http, "tiny", prompt, max_tokens=1)
    assert cached(complete(http, "judge", [*prompt, *INVOCATION, 5])) == len(prompt)
    assert cached(complete(http, "judge", [*prompt, *INVOCATION, 5])) == len(prompt) + 2
    report = http.get("/cache/report").json()
    names = [each["name"] for each in report["namespaces"]]
    assert any(name.startswith("a@") for name in names)


def test_reports_show_what_each_adapter_hit(http: httpx.Client) -> None:
    def reported() -> dict[str, dict[str, Any]]:
        # A reader may get a report that is a second old: the metrics are as of now.
        found: dict[str, dict[str, Any]] = {"a": {}, "judge": {}}
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for each in family.samples:
                if "adapter" in each.labels:
                    name, part = each.labels["adapter"].split("@")[0], each.labels.get("part", "")
                    what = each.name.removeprefix("coppice_adapter_").removesuffix("_total")
                    if name in found:
                        found[name][f"{what} {part}".strip()] = each.value
        return found

    def more(name: str) -> dict[str, float]:
        now = reported()[name]
        return {key: now[key] - before[name][key] for key in now if now[key] - before[name][key]}

    before, prompt = reported(), list(range(140, 173))
    complete(http, "tiny", prompt, max_tokens=1)
    complete(http, "a", prompt, max_tokens=1)
    complete(http, "a", prompt, max_tokens=1)
    assert more("a") == {
        "requests": 2, "prompt_tokens adapter": 66, "hit_tokens adapter": 32,
    }  # fmt: skip
    complete(http, "judge", [*prompt, *INVOCATION, 5], max_tokens=1)
    complete(http, "judge", [*prompt, *INVOCATION, 5], max_tokens=1)
    complete(http, "judge", prompt, max_tokens=1)  # the base model's
    assert more("judge") == {
        "requests": 2, "prompt_tokens base": 66, "prompt_tokens adapter": 6,
        "hit_tokens base": 66, "hit_tokens adapter": 2,
    }  # fmt: skip
    deadline = time.monotonic() + 10
    while True:
        report = http.get("/cache/report").json()
        found = {each["name"]: each for each in report["adapters"]}
        if found["judge"]["requests"] == reported()["judge"]["requests"]:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    jsonschema.validate(report, report_schema())
    assert (found["a"]["invoked"], found["judge"]["invoked"]) == (False, True)
    assert found["judge"]["base_hit_tokens"] == reported()["judge"]["hit_tokens base"]
    assert found["a"]["identity"] in {each["name"] for each in report["namespaces"]}


def test_loading_and_unloading_under_load(
    http: httpx.Client, server: LiveServer, folders: dict[str, Path]
) -> None:
    alone = [tokens(complete(http, name, cache_salt="x")) for name in ("tiny", "a")]
    found: list[list[list[int]]] = [[], []]
    ended = threading.Event()

    def ask(place: int, name: str) -> None:
        with httpx.Client(base_url=server.url, timeout=60, headers=http.headers) as client:
            while not (ended.is_set() and found[place]):
                found[place].append(tokens(complete(client, name)))

    threads = [threading.Thread(target=ask, args=each) for each in enumerate(("tiny", "a"))]
    for thread in threads:
        thread.start()
    for _ in range(3):
        body = {"lora_name": "b", "lora_path": str(folders["b"])}
        answer = http.post("/v1/load_lora_adapter", json=body)
        assert (answer.status_code, answer.text) == (
            200, "Success: LoRA adapter 'b' added successfully.",
        )  # fmt: skip
        first = complete(http, "b")
        assert cached(first) == 0, "what it computed before it was unloaded is not there"
        assert cached(complete(http, "b")) == len(PROMPT) - 1
        answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
        assert (answer.status_code, answer.text) == (
            200, "Success: LoRA adapter 'b' removed successfully.",
        )  # fmt: skip
        refused(http, 404, "/v1/completions", model="b", prompt=PROMPT)
    ended.set()
    for thread in threads:
        thread.join()
    for each, expected in zip(found, alone, strict=True):
        assert each
        assert all(tokens == expected for tokens in each)


def test_an_adapter_whose_client_has_gone_while_it_was_loaded_is_known(
    http: httpx.Client, server: LiveServer, folders: dict[str, Path]
) -> None:
    routes = server._server._adapters

    async def leave() -> None:
        task = asyncio.ensure_future(routes.load("b", str(folders["b"])))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        while routes._loading:
            await asyncio.sleep(0.005)

    server.run(leave())
    assert complete(http, "b")
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).status_code == 200


class Trap:
    """Runs code when a pickle of it is loaded."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.file, "w")


def test_a_bad_adapter_at_the_start_is_named(
    server: LiveServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    routes = server._server._adapters
    module = Module("b", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"lora_modules: 'b': lora_path: .* no such folder"):
        server.run(routes.start([module]))
    with pytest.raises(ValueError, match=r"lora_modules: 'b': base_model_name must be .* 'x'"):
        server.run(routes.start([Module("b", str(folders["b"]), "x")]))


def test_what_is_refused_leaves_the_server_as_it_was(
    http: httpx.Client, folders: dict[str, Path], tmp_path: Path, checkpoint: Path
) -> None:
    def load_adapter(name: str, path: object, status: int = 400, **more: Any) -> str:
        return refused(
            http, status, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more
        )

    assert "named 'a' is loaded already" in load_adapter("a", folders["b"])
    assert "lora_name must not be the model's own" in load_adapter("tiny", folders["b"])
    assert "lora_int_id must differ" in load_adapter("b", folders["b"], lora_int_id=1)
    assert "there is no such folder" in load_adapter("b", tmp_path / "none")
    assert "it has no adapter_config.json" in load_adapter("b", tmp_path)
    wide = save_adapter(tmp_path / "wide", load(checkpoint), rank=9)
    assert "at most max_lora_rank, 8, got 9" in load_adapter("b", wide)
    file = save_adapter(tmp_path / "cut", load(checkpoint)) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    assert f"{file} cannot be read" in load_adapter("b", file.parent)
    file.unlink()
    made = tmp_path / "made by a pickle"
    (file.parent / "adapter_model.bin").write_bytes(pickle.dumps(Trap(str(made))))
    assert "adapter_model.bin cannot be read" in load_adapter("b", file.parent)
    assert not made.exists(), "code of a pickle ran"
    for settings, said in (
        ({"use_dora": True}, "DoRA is not supported"),
        ({"target_modules": ["attention"]}, "unexpected tensors"),
    ):
        other = save_adapter(tmp_path / "other", load(checkpoint), **settings)
        assert said in load_adapter("b", other)
    deep = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2))  # fmt: skip
    assert "k_proj.lora_B.weight has shape" in load_adapter(
        "b", save_adapter(tmp_path / "deep", deep)
    )
    assert tokens(complete(http, "a", cache_salt="served")) == tokens(complete(http, "a"))
    body = {"lora_name": "c", "lora_path": str(folders["c"]), "lora_int_id": 7}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert "one adapter too many: max_loras is 3" in load_adapter("b", folders["b"])
    body = {"lora_name": "c", "lora_path": str(folders["b"]), "load_inplace": True}
    before = tokens(complete(http, "c"))
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    after = complete(http, "c")
    assert tokens(after) != before
    assert cached(after) == 0
    unload = "/v1/unload_lora_adapter"
    assert "must be 7, that of 'c', got 8" in refused(
        http, 400, unload, lora_name="c", lora_int_id=8
    )
    assert http.post(unload, json={"lora_name": "c", "lora_int_id": 7}).status_code == 200
    assert "no adapter is named 'c'" in refused(http, 404, unload, lora_name="c")
    assert "lora_path is required" in refused(http, 400, "/v1/load_lora_adapter", lora_name="c")
    assert tokens(complete(http, "a")) == tokens(complete(http, "a", cache_salt="new"))


def test_only_admins_load_and_unload(server: LiveServer, folders: dict[str, Path]) -> None:
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer k"}) as client:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            body = {"lora_name": "b", "lora_path": str(folders["b"])}
            assert "needs an admin key" in refused(client, 403, path, **body)


def test_an_anthropic_breakpoint_keeps_the_adapters_prefix(http: httpx.Client) -> None:
    body = {
        "model": "a",
        "max_tokens": 2,
        "system": [
            {
                "type": "text",
                "text": "The mat is at the door of the house. " * 4,
                "cache_control": {"type": "ephemeral"},
            }
        ],
        "messages": [{"role": "user", "content": "Where is the key?"}],
    }
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    (pin,) = http.get("/cache/pins").json()["data"]
    assert pin["namespace"].startswith("a@")
    assert pin["cached_tokens"] == pin["tokens"]


def test_the_option_lora_modules() -> None:
    assert all_modules(["a=b=c", '{"name": "d", "path": "e"}']) == [
        Module("a", "b=c"), Module("d", "e"),
    ]  # fmt: skip
    assert all_modules(['[{"name": "d", "path": "e", "base_model_name": null}]']) == [
        Module("d", "e")
    ]
    for wrong in ("a", "=b", "a=", "{", '{"name": "a"}', '{"name": 1, "path": "b"}', '["a"]',
                  '{"name": "a", "path": "b", "rank": "1"}'):  # fmt: skip
        with pytest.raises(ValueError, match="lora_modules must be NAME=PATH, or JSON such as"):
            ServerOptions(lora_modules=(wrong,))
    with pytest.raises(ValueError, match="two adapters are named 'a'"):
        ServerOptions(lora_modules=("a=b", "a=c"))

"""Adapters behind a hub: who has them, where their prompts go, and what takes their place."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from coppice.frontend.api.openai.adapters import AdapterRoutes
from coppice.frontend.api.served_model import ServedModel
from coppice.frontend.http.json_bodies import JsonBodies
from coppice.frontend.http.lora_modules import Module
from coppice.frontend.python.llm import LLM
from coppice.frontend.router.choosing.namespaces import Place
from coppice.frontend.router.client import ReplicasClient
from coppice.frontend.router.hub import Hub
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.sampling_params import SamplingParams
from tests.frontend.router.test_hub import text_of, until
from tests.runtime.helpers.adapter_files import save_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
PLACE = Place("legal", None, None)
TEXT = "the house has a door, and the mat before it has a key below." * 3


@pytest.fixture
def made(checkpoint: Path, tmp_path: Path) -> Callable[[int], LoRARequest]:
    """The adapter "legal" of a seed, in a folder of its own."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)

    def make(seed: int) -> LoRARequest:
        return LoRARequest("legal", 1, str(save_adapter(tmp_path / str(seed), model, seed=seed)))

    return make


@pytest.fixture
def alone(checkpoint: Path) -> Callable[[LoRARequest], str]:
    """What one engine answers with an adapter."""

    def answer(adapter: LoRARequest) -> str:
        llm = LLM(str(checkpoint), kv_cache_tokens=1024, enable_lora=True)
        return llm.generate(TEXT, GREEDY, lora_request=adapter)[0].outputs[0].text

    return answer


async def test_a_prompt_of_an_adapter_goes_where_it_is(
    cluster: Any, made: Callable[[int], LoRARequest]
) -> None:
    client, replicas = await cluster(2, enable_lora=True)
    legal = made(1)
    await client.ask("load_lora", legal)
    prompt = len(client.tokenizer.encode(TEXT))
    for _ in range(6):
        await text_of(client, TEXT, lora_request=legal)
        await until(lambda: not client.hub._flights)
    # It may be copied, if a busy machine makes the holder seem slow.
    counts = [each.engine.counters for each in replicas if each.engine.counters.requests]
    assert sum(each.hit_tokens for each in counts) == (6 - len(counts)) * (prompt - 1)
    assert client.hub.router.choose(client.tokenizer.encode(TEXT), PLACE).hit == prompt - 1
    found = client.hub.router.choose(client.tokenizer.encode(TEXT), PLACE._replace(adapter=None))
    assert found.hit == 0, "the base model's are others"


async def test_who_joins_later_has_the_adapters_and_sleeps(
    cluster: Any, replica: Any, made: Callable[[int], LoRARequest]
) -> None:
    client, replicas = await cluster(1, enable_lora=True)
    legal = made(1)
    await client.ask("load_lora", legal)
    await client.ask("sleep", 1)
    later = replica(enable_lora=True)
    await asyncio.to_thread(client.hub.join, "later", "127.0.0.1", later.door)
    assert await client.ask("is_sleeping"), "both do"
    assert later.engine.asleep
    assert later.engine.adapters.listed() == [legal]
    await client.ask("wake_up")
    await asyncio.gather(*(text_of(client, TEXT + c, lora_request=legal) for c in "abcdef"))
    await client.ask("unload_lora", "legal")
    assert [each.engine.adapters.listed() for each in (*replicas, later)] == [[], []]


async def test_an_adapter_is_replaced_while_its_requests_run(
    cluster: Any,
    made: Callable[[int], LoRARequest],
    alone: Callable[[LoRARequest], str],
) -> None:
    """Both versions are there for a while, and what the old one wrote leaves alone."""
    client, replicas = await cluster(2, enable_lora=True)
    old, new = made(1), made(2)
    await client.ask("load_lora", old)
    for each in replicas:
        each.slow = 0.005
    running = [
        asyncio.ensure_future(text_of(client, TEXT + c, LONG, lora_request=old)) for c in "abcd"
    ]
    await until(lambda: all(each.engine.scheduler.running for each in replicas))
    await client.ask("load_lora", new, replace=True)
    expected = alone(new)
    assert expected != alone(old)
    assert await text_of(client, TEXT, lora_request=new) == expected
    await asyncio.gather(*running)
    for each in replicas:
        each.slow = 0.0
    for c in "efgh":
        await text_of(client, TEXT + c, lora_request=new)
        assert await text_of(client, TEXT, lora_request=new) == expected
    await until(lambda: not client.hub._flights)
    assert client.hub.names == ["r0", "r1"]
    for each in replicas:
        each.engine.check()
    found = sum(each.engine.tree.cached_tokens for each in replicas)
    await until(lambda: client.hub.router.index.tokens <= found)


async def test_a_version_that_one_replica_refuses_leaves_the_one_before(
    cluster: Any, made: Callable[[int], LoRARequest]
) -> None:
    client, replicas = await cluster(2, enable_lora=True)
    old, new = made(1), made(2)
    await client.ask("load_lora", old)
    replicas[1].engine.adapters.named._max_rank = 2
    with pytest.raises(ValueError, match="rank"):
        await client.ask("load_lora", new, replace=True)
    await client.ask("list_loras")  # answered after what undoes it
    assert [each.engine.adapters.listed() for each in replicas] == [[old], [old]]


class Ingress:
    """The client of a hub, and the adapters that its server knows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.hub = Hub()
        self.client = ReplicasClient(self.hub, tokenizer)
        self.model = ServedModel(["tiny"], "tiny")
        bodies = JsonBodies(lambda: 512, 10.0)
        self.adapters = AdapterRoutes(self.model, self.client, bodies)

    async def start(self, modules: list[Module], **replicas: Any) -> None:
        for name, each in replicas.items():
            await asyncio.to_thread(self.hub.join, name, "127.0.0.1", each.door)
        await self.client.start()
        await self.adapters.start(modules)

    @property
    def known(self) -> dict[str, LoRARequest]:
        return {name: asked for name, (asked, _) in self.model.adapters.items()}


@pytest.mark.parametrize("killed", [True, False])
async def test_the_next_ingress_takes_over_the_adapters(
    replica: Any, tokenizer: Tokenizer, made: Callable[[int], LoRARequest], killed: bool
) -> None:
    """Those of the option, which it loads itself, and those that were loaded over HTTP."""
    module = Module("legal", made(1).lora_path)
    there, fresh, later = (replica(enable_lora=True) for _ in range(3))
    first = Ingress(tokenizer)
    await first.start([module], a=there)
    await first.adapters.load("medical", made(2).lora_path, number=7)
    if killed:
        await first.client.stop()
    second = Ingress(tokenizer)
    await second.start([module], b=fresh, a=there)
    assert second.known == first.known
    await asyncio.to_thread(second.hub.join, "later", "127.0.0.1", later.door)
    await second.client.ask("has_unfinished")  # which `later` answers after what it was told
    for each in (there, fresh, later):
        assert {asked.lora_name: asked for asked in each.engine.adapters.listed()} == first.known
    for asked in second.known.values():
        assert await text_of(second.client, TEXT, lora_request=asked)
    await second.adapters.load("medical", made(3).lora_path, replace=True)
    assert second.known["medical"].lora_int_id == 7
    await second.client.stop()
    if not killed:
        await first.client.stop()


async def test_an_adapter_whose_files_are_gone_hinders_no_ingress(
    replica: Any, tokenizer: Tokenizer, made: Callable[[int], LoRARequest]
) -> None:
    there, first, second = replica(enable_lora=True), Ingress(tokenizer), Ingress(tokenizer)
    await first.start([], a=there)
    asked = made(1)
    await first.adapters.load("legal", asked.lora_path)
    shutil.rmtree(asked.lora_path)
    await second.start([], a=there)
    assert await text_of(second.client, TEXT, lora_request=second.known["legal"])
    for each in (first, second):
        await each.client.stop()

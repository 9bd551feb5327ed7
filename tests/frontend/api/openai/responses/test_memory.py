"""What the server remembers of responses: chains, bounds, owners, time."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_core import from_json

from coppice.frontend.api.openai.responses import memory as module
from coppice.frontend.api.openai.responses.memory import Remembered, ResponseMemory


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def message(name: str, size: int = 0) -> dict[str, Any]:
    return {"id": name, "type": "message", "text": "x" * size}


def put(
    memory: ResponseMemory, name: str, before: Remembered | None = None, *, size: int = 0
) -> Remembered:
    response = {"id": name, "output": [message(f"{name}-out", size)]}
    memory.put("me", response, [message(f"{name}-in")], before)
    found = memory.get("me", name)
    assert found is not None
    return found


def used(memory: ResponseMemory) -> int:
    return memory._shelves["me"].size


def ids(found: Remembered) -> list[str]:
    return [item["id"] for item in found.conversation()]


def test_a_chain_is_one_conversation() -> None:
    memory = ResponseMemory(2**20, 60)
    last = put(memory, "c", put(memory, "b", put(memory, "a")))
    assert ids(last) == ["a-in", "a-out", "b-in", "b-out", "c-in", "c-out"]
    assert [item["id"] for item in last.input_items()] == ids(last)[:-1]
    holder = memory.holder("me", "b-out")
    assert holder is not None
    assert holder.own_items() == {name: message(name) for name in ("b-in", "b-out")}
    assert memory.holder("me", "d-out") is None


def test_a_conversation_goes_on_without_logprobs() -> None:
    """They may be a hundred times its text, and only the response itself is asked for them."""
    memory = ResponseMemory(2**20, 60)
    part = {"type": "output_text", "text": "On.", "logprobs": [{"token": "x"}] * 5_000}
    item = {"id": "a-out", "type": "message", "content": [part]}
    response = {"id": "a", "output": [item, message("b-out")]}
    memory.put("me", response, [message("a-in")], None)
    found = memory.get("me", "a")
    assert found is not None
    assert from_json(found.body) == response
    bare = item | {"content": [part | {"logprobs": []}]}
    assert found.conversation() == [message("a-in"), bare, message("b-out")]
    assert found.own_items()["a-out"] == bare
    assert found.whole < 1_000 < len(found.body) < found.size == used(memory)
    after = put(memory, "b", found)
    assert found.whole < after.whole < 2_000


def test_what_is_deleted_is_kept_as_long_as_another_response_continues_it() -> None:
    memory = ResponseMemory(2**20, 60)
    first = put(memory, "a")
    second = put(memory, "b", first)
    both = used(memory)
    assert memory.delete("me", "a")
    assert not memory.delete("me", "a")
    assert memory.get("me", "a") is None
    assert ids(second) == ["a-in", "a-out", "b-in", "b-out"]
    assert used(memory) == both
    assert memory.delete("me", "b")
    assert used(memory) == 0
    assert memory.holder("me", "a-in") is None


def test_a_response_that_was_deleted_while_another_continued_it_counts_again() -> None:
    memory = ResponseMemory(2**20, 60)
    first = put(memory, "a")
    size = used(memory)
    memory.delete("me", "a")
    second = put(memory, "b", first)
    assert used(memory) == size + second.size
    assert memory.holder("me", "a-in") is not None
    memory.delete("me", "b")
    assert used(memory) == 0


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    memory = ResponseMemory(22_000, 60)
    for name in "abc":
        put(memory, name, size=5_000)
    assert memory.get("me", "a") is not None  # used again
    put(memory, "d", size=5_000)
    assert [name for name in "abcd" if memory.get("me", name)] == ["a", "c", "d"]
    assert used(memory) <= 22_000
    before = used(memory)
    memory.put("me", {"id": "e", "output": [message("e", 30_000)]}, [], None)
    assert memory.get("me", "e") is None, "more than all of the memory"
    assert used(memory) == before, "it takes no other one's place"


def test_an_item_of_two_responses_is_found_as_long_as_one_is_remembered() -> None:
    memory = ResponseMemory(2**20, 60)
    for name in "ab":
        memory.put("me", {"id": name, "output": []}, [message("shared"), message("shared")], None)
    assert memory.delete("me", "b")
    assert memory.holder("me", "shared") is not None
    assert memory.delete("me", "a")
    assert memory.holder("me", "shared") is None
    assert not memory._shelves["me"].items


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RESPONSES", 2)
    memory = ResponseMemory(2**20, 60)
    for name in "abc":
        put(memory, name)
    assert [name for name in "abc" if memory.get("me", name)] == ["b", "c"]


def test_owners_do_not_see_each_other() -> None:
    memory = ResponseMemory(2**20, 60)
    put(memory, "a")
    assert memory.get("you", "a") is None
    assert memory.holder("you", "a-in") is None
    assert not memory.delete("you", "a")
    assert memory.get("me", "a") is not None


def test_time_without_use_ends_them() -> None:
    clock = Clock()
    memory = ResponseMemory(2**20, 60, clock)
    put(memory, "a")
    put(memory, "b")
    clock.now = 50
    assert memory.get("me", "a") is not None
    clock.now = 100
    assert memory.get("me", "b") is None
    assert memory.get("me", "a") is not None
    clock.now = 161
    assert memory.get("me", "a") is None
    assert used(memory) == 0

"""Adapters without matrices for the fake model, whose keys depend on who computes them."""

from __future__ import annotations

import random

from coppice.radix.node import Root
from coppice.runtime.engine.core import Engine
from coppice.runtime.model.adapters.names import Adapter
from coppice.runtime.requests.lora_request import LoRARequest

#: By name, the tokens that invoke it; None: it acts on all.
INVOCATIONS: dict[str, tuple[int, ...] | None] = {
    "plain": None,
    "other": None,
    "judge": (1, 0),
    "guard": (1,),
}


class NoMatrices:
    """Stands for `LoadedAdapters`."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def drop(self, number: int) -> None:
        self.numbers.remove(number)


def install(engine: Engine, adapter: Adapter) -> None:
    """Makes an adapter known to an engine, in place of another of its name."""
    named = engine.adapters.named
    named._named[adapter.asked.lora_name] = adapter
    if adapter.mark is not None:
        named.marks[adapter.mark] = adapter.identity.encode()


class FakeAdapters:
    """The adapters of a schedule, which come and go."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self._engine, self._rng = engine, rng
        self._matrices = engine.adapters.named._loaded = NoMatrices()  # type: ignore[assignment]
        self.now: dict[str, Adapter] = {}
        self._made = 0
        for name in INVOCATIONS:
            self._load(name)

    def asked(self) -> list[LoRARequest]:
        """How requests ask for those that are loaded."""
        return [each.asked for each in self.now.values()]

    def change(self) -> None:
        """Unloads one, and loads another one of its name."""
        name = self._rng.choice(list(INVOCATIONS))
        self._engine.adapters.unload(name)
        self._load(name)

    def _load(self, name: str) -> None:
        number = self._made
        self._made += 1
        invocation = INVOCATIONS[name]
        mark = None if invocation is None else (1 << 30) + number
        asked = LoRARequest(name, number + 1, f"folder {number}")
        self.now[name] = Adapter(asked, number, f"{name}@{number}", invocation, mark)
        self._matrices.numbers.append(number)
        install(self._engine, self.now[name])

    def check(self) -> None:
        """While nothing runs, the tree and the memory have only adapters that are loaded."""
        assert not self._engine.adapters.named.retiring
        present = {each.number for each in self.now.values()}
        assert set(self._matrices.numbers) == present
        names = {None, *(each.identity for each in self.now.values())}
        marks = {each.mark for each in self.now.values()}
        for node in self._engine.tree.nodes():
            root = node.path()[0].parent
            assert isinstance(root, Root)
            assert root.namespace.adapter in names  # type: ignore[attr-defined]
            tokens = memoryview(node.prefix()).cast("i")
            assert all(token in marks for token in tokens if token >= 1 << 30)

"""Adapters in a running engine: they are loaded and unloaded between steps, with their pages."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from coppice.radix import Pins, RadixTree
from coppice.radix.upkeep.removal import remove_below, remove_namespace
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.sequences import Sequences
from coppice.runtime.metrics.adapter_counts import AdapterReport
from coppice.runtime.metrics.counters import EngineCounters
from coppice.runtime.model.adapters.names import Adapter, Adapters
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.runner.forward import ModelRunner


class EngineAdapters:
    """The adapters that the requests of one engine may ask for.

    Args:
        config: the engine's options.
        runner: has their matrices.
        sequences: that may use them.
        pins: some of which may be theirs.
        tree: returns the tree that has their KV.
        counters: have the counts of their requests.

    Attributes:
        named: those that are loaded.
        cleared: is called with one whose pages were removed.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        sequences: Sequences,
        pins: Pins,
        tree: Callable[[], RadixTree],
        counters: EngineCounters,
    ) -> None:
        self.named = Adapters(
            runner.model_config,
            runner.adapters,
            max_rank=config.max_lora_rank,
            max_adapters=config.max_loras,
            freed=self._remove_pages,
        )
        self.cleared: Callable[[Adapter], None] = lambda adapter: None
        self._sequences, self._pins, self._tree = sequences, pins, tree
        self._counts = counters.adapter_counts

    def load(self, lora_request: LoRARequest, *, replace: bool = False) -> None:
        """Loads an adapter, so that no request waits for it; with `replace` in place of another.

        Raises ValueError as `Adapters.load` does.
        """
        self.named.load(lora_request, replace=replace)
        self.refresh()

    def unload(self, name: str) -> None:
        """Unloads an adapter: new requests do not get it, and what runs with it runs to its end.

        Its pages are free as soon as nothing runs with it. Raises ValueError if there is none of
        that name.
        """
        self.named.unload(name)
        self.refresh()

    def listed(self) -> list[LoRARequest]:
        """Those that requests may use."""
        return self.named.listed()

    def report(self) -> tuple[AdapterReport, ...]:
        """What the requests of each took from the cache."""
        return tuple(
            AdapterReport(
                each.asked.lora_name,
                each.identity,
                each.invocation is not None,
                not named,
                *self._counts.of(each.number),
            )
            for each, named in self.named.all()
        )

    def refresh(self) -> None:
        """Gives back what was unloaded and is not used any more; O(1) if nothing was unloaded."""
        if self.named.retiring:
            uses = (sequence.request.adapter for sequence in self._sequences)
            self.named.free({use.number for use in uses if use is not None})

    def _remove_pages(self, adapter: Adapter) -> None:
        """Removes what an adapter has computed from the cache, and its pins."""
        tree, mark = self._tree(), adapter.mark
        for pin in list(self._pins):
            marked = mark is not None and mark in array("i", pin.tokens)
            if marked or getattr(pin.namespace, "adapter", None) == adapter.identity:
                self._pins.unpin(pin.name)
        if mark is not None:
            remove_below(tree, mark)
        for namespace in list(tree.roots):
            if getattr(namespace, "adapter", None) == adapter.identity:
                remove_namespace(tree, namespace)
        self._counts.forget(adapter.number)
        self.cleared(adapter)

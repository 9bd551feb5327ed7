"""One replica on Ray Serve: an actor that runs an engine, to which ingresses connect."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import ray

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.client.process import EngineProcess
from coppice.frontend.http import logs
from coppice.frontend.http.lora_modules import Module, all_modules
from coppice.frontend.router.cluster.scaling import BUSY, busy
from coppice.frontend.router.cluster.settings import ClusterSettings, Kind
from coppice.frontend.router.cluster.slots import Slot
from coppice.frontend.text.model.loading import load_around
from coppice.runtime.config import CPU_FRACTION, EngineConfig
from coppice.runtime.metrics.events.load import Load
from coppice.runtime.process.messages import Door
from coppice.runtime.requests.lora_request import LoRARequest

_LOOK_SECONDS = 0.5  # between two looks whether the engine was started again
_GONE_SECONDS = 5.0  # after which an ingress that is not connected counts as gone


class EngineReplica:
    """The engine's process, its health and its load. Requests do not pass through this actor."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: ClusterSettings, reserved: Mapping[str, float]
    ) -> None:
        """Starts the engine and waits until its model is loaded. Raises as `serve` does.

        `reserved`: what Ray keeps for it, by the names of its resources.
        """
        logs.configure(settings.options.log_format, settings.options.log_level)
        self._kind = settings.kind
        # Ray sets 1, whatever it reserves; the engine's process takes it from here.
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(reserved["CPU"])))
        config = _own_share(settings.config, reserved)
        if config.disk_cache is not None:
            self._slot = Slot.of(config.disk_cache)  # until this process ends
            config = replace(config, disk_cache=str(self._slot.folder))
        loaded = load_around(config, settings.text, without_torch=True)
        self._host = settings.engines_at or ray.util.get_node_ip_address()
        launch = partial(
            EngineProcess,
            loaded.config,
            setup=partial(logs.configure, settings.options.log_format, settings.options.log_level),
            host=self._host,
            **loaded.engine_arguments,
        )
        self._engine = EngineClient(
            launch,
            loaded.tokenizer,
            loaded.defaults,
            timeout=settings.options.engine_timeout or None,
        )
        await self._engine.start()
        await self._try_adapters(all_modules(settings.options.lora_modules))

    async def _try_adapters(self, modules: Sequence[Module]) -> None:
        """Loads the adapters, so that an update that can't succeed ends with its first replica.

        Then unloads them: what replicas have by now, a client of the ingress may have changed, and
        the hub tells it to those that join.
        """
        for number, each in enumerate(modules, 1):
            try:
                asked = LoRARequest(each.name, number, each.path)
                await self._engine.ask("load_lora", asked, replace=True)
            except ValueError as error:
                raise ValueError(f"lora_modules: {each.name!r}: {error}") from error
        for each in modules:
            await self._engine.ask("unload_lora", each.name)

    async def kind(self, name: str) -> Kind:
        """That of its settings; ingresses of other kinds leave this replica, `name`, alone."""
        return self._kind

    async def session(self, name: str, hub: str) -> AsyncIterator[tuple[str, Door]]:
        """Where the engine takes callers: now, and again whenever it was started anew.

        It lasts until the ingress ends it, or is gone. While it does Serve does not end this
        replica, so that what runs ends first. `name` is that of this replica, `hub` that of the
        ingress's hub, which connects to the engine.
        """
        told: Door | None = None
        seen = time.monotonic()
        while time.monotonic() - seen < _GONE_SECONDS:
            ready = self._engine.ready
            if ready is not None and ready.door is not None and ready.door != told:
                told = ready.door
                yield self._host, told
                seen = time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS)
            # Serve does not end a call whose caller was killed.
            if not self._engine.alive or hub in await self._engine.ask("callers"):
                seen = time.monotonic()

    async def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._engine.alive

    async def check_health(self) -> None:
        """Raises RuntimeError while the engine does not work; Serve then replaces this replica."""
        if self._engine.trouble is not None:
            raise RuntimeError(self._engine.trouble)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """How busy the engine is, for `scaling.policy`."""
        ready = self._engine.ready
        if ready is None or not self._engine.alive:
            return {}
        load: Load = await self._engine.ask("load")
        return {BUSY: busy(load, ready.max_num_seqs)}

    async def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            await engine.stop()


def _own_share(config: EngineConfig, reserved: Mapping[str, float]) -> EngineConfig:
    """The config of a replica that shares this machine's memory with others, as it does the cores.

    A GPU is its own.
    """
    if "GPU" in reserved:
        return config
    share = min(1.0, reserved["CPU"] / (os.cpu_count() or 1))
    fraction = config.kv_cache_memory_fraction or CPU_FRACTION
    return replace(config, kv_cache_memory_fraction=fraction * share)

"""Engines whose ranks are threads of this process, which start at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coppice.kernels.cpu.ranks.errors import RanksEnded
from coppice.kernels.cpu.ranks.memory import RankMemory, region_bytes, shared_file
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine import core
from coppice.runtime.engine.core import Engine
from coppice.runtime.runner.cache.size import Beside
from coppice.runtime.runner.forward import ModelRunner
from coppice.runtime.runner.ranks.following import take_part
from coppice.runtime.runner.ranks.shared_group import SharedGroup

#: An engine of the checkpoint in a folder, on so many ranks, with further options.
StartRanks = Callable[..., Engine]


@pytest.fixture
def start_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartRanks]:
    """``start_threads(path, ranks, **options)`` is an engine; all are closed at the end."""
    engines: list[Engine] = []
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []

    def part(config: EngineConfig, group: SharedGroup) -> None:
        try:
            take_part(ModelRunner(config, group))
        except RanksEnded:
            pass
        except BaseException as error:
            failures.append(error)
            group.end(f"rank {group.rank} of the model: {type(error).__name__}: {error}")

    def open_runner(config: EngineConfig, beside: Beside) -> ModelRunner:
        size = config.tensor_parallel_size
        if size == 1:
            return ModelRunner(config, beside=beside)
        room = region_bytes(64 * 300)  # fewer numbers than the logits of some steps
        descriptor = shared_file(size, room)
        groups = [
            SharedGroup(RankMemory(descriptor, rank, size, room), rank, size, ExitStack())
            for rank in range(size)
        ]
        os.close(descriptor)
        for group in groups[1:]:
            threads.append(threading.Thread(target=part, args=(config, group)))
            threads[-1].start()
        try:
            return ModelRunner(config, groups[0])
        except BaseException:
            groups[0].close()
            for thread in threads:
                thread.join(20)
            failures.clear()  # the others refuse the same
            raise

    def start(path: Path, ranks: int, **options: object) -> Engine:
        limits = {"kv_cache_tokens": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 24}
        config = EngineConfig(model=str(path), tensor_parallel_size=ranks, **(limits | options))
        engines.append(Engine(config))
        return engines[-1]

    monkeypatch.setattr(core, "open_runner", open_runner)
    yield start
    for engine in engines:
        engine.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank did not end"
    assert not failures, failures

"""Opens the tiers that an engine's options name, and says what their pages depend on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash

from coppice.kernels.cpu.code.processor import PATHS, path_of
from coppice.kernels.pages.transfers import PageTransfers
from coppice.runtime.config import EngineConfig
from coppice.runtime.runner.forward import ModelRunner
from coppice.runtime.schedule.scheduler import Scheduler
from coppice.runtime.schedule.step_times import StepTimes
from coppice.runtime.startup.room import available_memory, readable
from coppice.runtime.tiers.digest import cache_file, weights_digest, weights_stamps
from coppice.runtime.tiers.disk.store import DiskStore
from coppice.runtime.tiers.exchange import WAITING_BYTES, Tiers
from coppice.runtime.tiers.host import HostStore
from coppice.runtime.tiers.sizes import parse_size
from coppice.runtime.tiers.store import Store, TierFailed

logger = logging.getLogger(__name__)

#: Changes whenever the same weights and tokens give other numbers, or a page another layout.
NUMBERS = 1

#: Seconds in which pages are stored when an engine ends, if nobody says how long it may take.
CLOSING_SECONDS = 6.0

_MOST_WAITING = 4 * 2**30  # bytes of pages that may wait to be written
# Bytes of a divided model's pages that may wait to be written or taken; taken as far as needed.
_ON_THEIR_WAY = _MOST_WAITING + 4 * 2**30


def open_tiers(config: EngineConfig, runner: ModelRunner, scheduler: Scheduler) -> Tiers | None:
    """The tiers of an engine, in use from now on; None if it has none.

    Raises ValueError if one can't be used, OSError if the weights can't be read; whatever it
    raises, nothing is left open.
    """
    if not (config.host_cache or config.disk_cache or config.shared_cache):
        return None
    with ExitStack() as undo:
        tiers = _open(config, runner, scheduler, undo)
        undo.pop_all()
    return tiers


def _open(
    config: EngineConfig, runner: ModelRunner, scheduler: Scheduler, undo: ExitStack
) -> Tiers:
    """`open_tiers`; `undo` closes what was opened, some of it twice, which does no harm."""
    transfers = runner.use_transfers(_ON_THEIR_WAY)
    stores: list[Store] = []

    def add(store: Store) -> None:
        undo.callback(store.close)
        stores.append(store)

    try:
        if config.host_cache is not None:
            size = parse_size("host_cache", config.host_cache)
            if size > (there := available_memory(torch.device("cpu"))):
                raise ValueError(
                    f"host_cache is {config.host_cache!r}; it must be at most the main memory that "
                    f"is free, {readable(there)}"
                )
            add(HostStore(size, transfers.page_bytes, runner.device))
        if config.disk_cache is not None:
            folder = str(Path(config.disk_cache).expanduser())
            size = parse_size("disk_cache_size", config.disk_cache_size)
            disk, dtype = partial(DiskStore, folder, size), config.disk_cache_dtype
            add(_opened(runner, transfers, disk, "disk_cache_dtype", dtype))
        if (address := config.shared_cache) is not None:
            from coppice.runtime.tiers.shared import SharedStore

            shared, dtype = partial(SharedStore, address), config.shared_cache_dtype
            add(_opened(runner, transfers, shared, "shared_cache_dtype", dtype))
    except TierFailed as error:
        raise ValueError(str(error)) from error
    times = scheduler.times or StepTimes(2.0)  # the limit does not matter: nothing asks for it
    tiers = Tiers(
        stores,
        tree=scheduler.paging.tree,
        transfers=transfers,
        copy=runner.copy_pages,
        digest=numbers_digest(config, runner),
        compute_seconds=times.prefill_seconds,
        vocabulary=runner.model_config.vocab_size,
        waiting_bytes=_waiting_bytes(config, transfers.page_bytes),
    )
    undo.callback(tiers.close, 0.0)
    scheduler.use(tiers, times)
    logger.info("pages are kept in: %s", ", ".join(store.name for store in stores))
    return tiers


def _waiting_bytes(config: EngineConfig, page_bytes: int) -> int:
    """Bytes of pages that may wait to be written: a step can evict as many as it fills."""
    step = -(-config.most_tokens // config.page_size) * page_bytes
    return min(max(WAITING_BYTES, 2 * step), _MOST_WAITING)


def _opened(
    runner: ModelRunner,
    transfers: PageTransfers,
    store: Callable[[int], Store],
    name: str,
    dtype: str,
) -> Store:
    """A store for what `transfers` packs; `store` opens one, given the bytes of each page.

    Raises ValueError, naming the option `name`, if the pages can't be kept as `dtype`.
    """
    if dtype == "auto":
        return store(transfers.page_bytes)
    from coppice.kernels.rounding import Rounding
    from coppice.runtime.tiers.rounded import RoundedStore

    try:
        rounding = Rounding(runner.kv_cache, dtype, transfers.page_bytes)
    except ValueError as error:
        raise ValueError(f"{name} must be 'auto': {error}") from error
    return RoundedStore(store(rounding.page_bytes), rounding)


def digest_of_weights(config: EngineConfig, runner: ModelRunner) -> bytes:
    """What tells the weights of an engine from others of the same shapes.

    Files are read once, and remembered: those of the folder that was loaded, since what a hub id
    names may be another one by now. Of files that were changed since they were loaded nobody can
    say any more what they contained; then it is a digest that nothing else has.

    Raises OSError if one can't be read.
    """
    if config.load_format == "dummy":
        return b"dummy" + str(config.seed).encode()
    digest = weights_digest(runner.path, cache_file())
    if weights_stamps(runner.path) != runner.stamps:
        logger.warning(
            "files in %s were changed while their weights were loaded: tiers find nothing of "
            "before, and nobody else what is kept now; start again once the files are complete",
            runner.path,
        )
        return os.urandom(16)
    return digest


def _instructions(device: torch.device) -> tuple[str, ...]:
    """What computes: other devices, and other instructions of a CPU, round otherwise."""
    if device.type == "cuda":
        return device.type, torch.cuda.get_device_name(device)
    return device.type, *(path_of(kind) for kind in PATHS if kind != "memory")


def numbers_digest(config: EngineConfig, runner: ModelRunner) -> bytes:
    """What the numbers of a page depend on beside its tokens and its namespace: 16 bytes.

    The weights by their content, the types and kernels that compute with them, and the layout.
    """
    weights = digest_of_weights(config, runner)
    cache = runner.kv_cache[0]
    described = repr((
        NUMBERS,
        runner.model_config,
        config.quantization,
        config.dtype,
        config.deterministic,
        _instructions(runner.device),
        runner.attention.name,
        [(tuple(each.k.shape[1:]), str(each.k.dtype)) for each in (cache, runner.kv_cache[-1])],
        runner.page_size,
        # What comes back rounded from one tier may go on to another, and all that is computed after
        # it depends on it.
        *(("disk", config.disk_cache_dtype) if config.disk_cache_dtype != "auto" else ()),
        *(("shared", config.shared_cache_dtype) if config.shared_cache_dtype != "auto" else ()),
        # The order of sums, and whose part of a page comes first.
        *(("ranks", runner.group.size) if runner.group.size > 1 else ()),
    ))  # fmt: skip
    state = xxhash.xxh3_128(weights + described.encode())
    for layer in runner.kv_cache:
        for scale in layer.scales or ():
            state.update(np.ascontiguousarray(scale.detach().cpu().float().numpy()).tobytes())
    if runner.transfers is not None:
        for mark in runner.transfers.marks:
            state.update(mark)
    return state.digest()


def digest_anew(config: EngineConfig, runner: ModelRunner) -> bytes:
    """`numbers_digest` after weights were read again; one that nothing has if files are gone."""
    try:
        return numbers_digest(config, runner)
    except OSError as error:
        logger.warning("tiers find nothing of before, since the weights can't be read: %s", error)
        return os.urandom(16)

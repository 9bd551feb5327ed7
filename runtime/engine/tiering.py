"""Opens the tiers that an engine's options name, and says what their pages depend on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash

from coppice.kernels.cpu.code.processor import PATHS, path_of
from coppice.kernels.pages.packing import packed_bytes
from coppice.kernels.pages.transfers import PageTransfers, page_transfers
from coppice.runtime.config import EngineConfig
from coppice.runtime.runner.forward import ModelRunner
from coppice.runtime.schedule.paging import PageCopy, copy_batches
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
            add(HostStore(size, packed_bytes(runner.kv_cache), runner.device))
        if config.disk_cache is not None:
            folder = str(Path(config.disk_cache).expanduser())
            size = parse_size("disk_cache_size", config.disk_cache_size)
            disk = partial(DiskStore, folder, size)
            add(_opened(runner, disk, "disk_cache_dtype", config.disk_cache_dtype))
        if (address := config.shared_cache) is not None:
            from coppice.runtime.tiers.shared import SharedStore

            shared = partial(SharedStore, address)
            dtype = config.shared_cache_dtype
            add(_opened(runner, shared, "shared_cache_dtype", dtype))
    except TierFailed as error:
        raise ValueError(str(error)) from error
    times = scheduler.times or StepTimes(2.0)  # the limit does not matter: nothing asks for it
    transfers = runner.transfers = page_transfers(lambda: runner.kv_cache)
    tiers = Tiers(
        stores,
        tree=scheduler.paging.tree,
        transfers=transfers,
        copy=partial(_copy, runner, transfers),
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


def _opened(runner: ModelRunner, store: Callable[[int], Store], name: str, dtype: str) -> Store:
    """A store for the pages of a runner; `store` opens one, given the bytes of each page.

    Raises ValueError, naming the option `name`, if the pages can't be kept as `dtype`.
    """
    if dtype == "auto":
        return store(packed_bytes(runner.kv_cache))
    from coppice.kernels.rounding import Rounding
    from coppice.runtime.tiers.rounded import RoundedStore

    try:
        rounding = Rounding(runner.kv_cache, dtype)
    except ValueError as error:
        raise ValueError(f"{name} must be 'auto': {error}") from error
    return RoundedStore(store(rounding.page_bytes), rounding)


def _copy(runner: ModelRunner, transfers: PageTransfers, copies: Iterable[PageCopy]) -> None:
    for batch in copy_batches(copies):
        sources, targets = [each.source for each in batch], [each.target for each in batch]
        transfers.needed([*sources, *targets])
        runner.attention.copy_pages(runner.kv_cache, sources, targets)


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
    ))  # fmt: skip
    state = xxhash.xxh3_128(weights + described.encode())
    for layer in runner.kv_cache:
        for scale in layer.scales or ():
            state.update(np.ascontiguousarray(scale.detach().cpu().float().numpy()).tobytes())
    return state.digest()


def digest_anew(config: EngineConfig, runner: ModelRunner) -> bytes:
    """`numbers_digest` after weights were read again; one that nothing has if files are gone."""
    try:
        return numbers_digest(config, runner)
    except OSError as error:
        logger.warning("tiers find nothing of before, since the weights can't be read: %s", error)
        return os.urandom(16)

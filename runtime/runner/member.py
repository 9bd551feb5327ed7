"""The runner of an engine's model, alone or as the first of several ranks; and the others' main."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import weakref
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from coppice.kernels.cpu.ranks.errors import RanksEnded
from coppice.runtime.config import EngineConfig
from coppice.runtime.model.files.path import resolve_model
from coppice.runtime.model.parallel.division import check_division
from coppice.runtime.model.weights import resolve_device
from coppice.runtime.runner.cache.scales import CALIBRATION_TOKENS
from coppice.runtime.runner.cache.size import NOTHING_BESIDE, Beside
from coppice.runtime.runner.forward import ModelRunner
from coppice.runtime.runner.implementation import choose
from coppice.runtime.runner.ranks.cores import take_cores
from coppice.runtime.runner.ranks.ending import EndingGroup
from coppice.runtime.runner.ranks.following import take_part
from coppice.runtime.runner.ranks.starting import Assignment, leave_with_parent, start_ranks
from coppice.runtime.runner.ranks.torch_group import TorchGroup
from coppice.runtime.runner.step_sizes import sized

logger = logging.getLogger(__name__)

_MAIN = f"{__name__}:member_main"


def open_runner(config: EngineConfig, beside: Beside = NOTHING_BESIDE) -> ModelRunner:
    """The runner of the model that `config` names, whose other ranks are started or joined.

    `beside` is what a draft model takes, which a model alone may have.

    Raises as `ModelRunner` does; ValueError also if the model can't be divided or torchrun has
    started this process as another rank than the first, RuntimeError with the reason if another
    rank fails. Nothing that was started runs on then.
    """
    config = sized(config)
    if config.tensor_parallel_size == 1:
        return ModelRunner(config, beside=beside)
    if launched := launched_rank():
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and torchrun has started this "
            f"process as rank {launched}: only rank 0 has an engine; `coppice serve` and `coppice "
            "generate` run under torchrun"
        )
    path = resolve_model(config.model, config.revision)
    model = choose(path, config).config
    check_division(model, config.tensor_parallel_size)
    device = resolve_device(config.device)
    group: EndingGroup
    if launched is not None:
        config, group = _joined(config, device)
    else:
        rows = max(config.most_tokens, CALIBRATION_TOKENS)
        group = start_ranks(config, device, rows * model.hidden_size, _MAIN)
    try:
        runner = _complete(config, group)
    except BaseException as error:
        reason = group.ended
        group.close()
        if isinstance(error, RanksEnded) and reason is not None:
            raise RuntimeError(reason) from error
        raise
    # The processes end with a runner that nobody has closed.
    weakref.finalize(runner, group.close).atexit = False
    return runner


def _complete(config: EngineConfig, group: EndingGroup) -> ModelRunner:
    """This rank's runner, once all have theirs: none begins to compute while another one fails."""
    runner = ModelRunner(config, group)
    group.least(0)
    return runner


def launched_rank() -> int | None:
    """The rank that torchrun gave this process; None where it did not start it."""
    rank = os.environ.get("RANK")
    launched = (
        rank is not None and "MASTER_ADDR" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
    )
    return int(rank) if rank is not None and launched else None


def run_launched(config: EngineConfig) -> bool:
    """Whether torchrun started this process as another rank than the first, whose part it takes.

    It returns then when the first rank has closed the engine: torchrun sends its signals to all,
    and the first one may have requests to end. Raises as `open_runner`, and what torch.distributed
    raises when that rank has ended otherwise.
    """
    if not launched_rank():
        return False
    config, group = _joined(config, resolve_device(config.device))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(RanksEnded):
        take_part(_complete(config, group))
    group.close()
    return True


def _joined(config: EngineConfig, device: torch.device) -> tuple[EngineConfig, TorchGroup]:
    """The group of the processes that torchrun started, and the options with the first one's sizes.

    Those that are open follow from a GPU, and ranks whose steps have other sizes would not meet.
    Raises ValueError for another number of processes, or more than there are GPUs.
    """
    size = int(os.environ["WORLD_SIZE"])
    if size != config.tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; torchrun has started {size} "
            "processes, so it must be that"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    for name in ("host_cache", "disk_cache", "shared_cache"):
        if (value := getattr(config, name)) is not None and here < size:
            raise ValueError(
                f"{name} must be None where torchrun starts ranks on several machines, got "
                f"{value!r}: ranks bring their parts of pages together in memory that they share"
            )
    if device.type == "cuda":
        local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= there:
            raise ValueError(
                f"torchrun has started process {local} on this machine, counted from 0; on GPUs "
                f"--nproc-per-node must be at most their number, {there}"
            )
        device = torch.device("cuda", local)
    rank = int(os.environ["RANK"])
    group = TorchGroup(rank, size, device, ExitStack(), in_order=config.deterministic)
    if rank == 0:
        group.send(pickle.dumps((config.max_num_seqs, config.max_num_batched_tokens)))
        return config, group
    seqs, tokens = pickle.loads(group.receive())
    return replace(config, max_num_seqs=seqs, max_num_batched_tokens=tokens), group


def member_main(descriptor: int) -> None:
    """What the process of a rank but the first runs; `descriptor` is its connection's.

    It ends with the process that started it, and says first what makes it fail.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the whole group
    connection = Connection(descriptor)
    told = connection.recv()
    assert isinstance(told, Assignment)
    take_cores(told.cores)
    leave_with_parent(connection)
    try:
        with ExitStack() as held:
            if told.take_device():
                connection.send(None)
            take_part(_complete(told.config, told.join(held)))
    except RanksEnded:
        status = 0
    except BaseException as error:
        status = 1
        connection.send(f"{type(error).__name__}: {error}")
        logger.debug("rank %d fails", told.rank, exc_info=True)
    # Nothing is left to be saved; see `process.loop.engine_main`.
    sys.stdout.flush()
    os._exit(status)

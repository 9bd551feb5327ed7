"""The runner of an engine's model, alone or as the first of several ranks; and the others' main."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import ExitStack, suppress
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

    Raises as `ModelRunner` does; ValueError also if the model can't be divided, RuntimeError with
    the reason if another rank fails. Nothing that was started runs on then.
    """
    config = sized(config)
    if config.tensor_parallel_size == 1:
        return ModelRunner(config, beside=beside)
    path = resolve_model(config.model, config.revision)
    model = choose(path, config).config
    check_division(model, config.tensor_parallel_size)
    device = resolve_device(config.device)
    group: EndingGroup
    if launched_rank() is not None:
        group = _joined(config, device)
    else:
        rows = max(config.most_tokens, CALIBRATION_TOKENS)
        group = start_ranks(config, device, rows * model.hidden_size, _MAIN)
    try:
        return ModelRunner(config, group)
    except BaseException as error:
        reason = group.ended
        group.close()
        if isinstance(error, RanksEnded) and reason is not None:
            raise RuntimeError(reason) from error
        raise


def launched_rank() -> int | None:
    """The rank that torchrun gave this process; None where it did not start it."""
    rank = os.environ.get("RANK")
    launched = (
        rank is not None and "MASTER_ADDR" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
    )
    return int(rank) if rank is not None and launched else None


def run_launched(config: EngineConfig) -> bool:
    """Whether torchrun started this process as another rank than the first, whose part it takes.

    It returns then when the first rank has closed the engine. Raises as `open_runner`, and what
    torch.distributed raises when that rank has ended otherwise.
    """
    rank = launched_rank()
    if not rank or config.tensor_parallel_size == 1:
        return False
    group = _joined(config, resolve_device(config.device))
    with suppress(RanksEnded):
        take_part(ModelRunner(config, group))
    group.close()
    return True


def _joined(config: EngineConfig, device: torch.device) -> TorchGroup:
    """The group of the processes that torchrun started. Raises ValueError for another number."""
    size = int(os.environ["WORLD_SIZE"])
    if size != config.tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; torchrun has started {size} "
            "processes, so it must be that"
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return TorchGroup(int(os.environ["RANK"]), size, device, ExitStack())


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
            group = told.join(held)
            take_part(ModelRunner(told.config, group))
    except RanksEnded:
        status = 0
    except BaseException as error:
        status = 1
        connection.send(f"{type(error).__name__}: {error}")
        logger.debug("rank %d fails", told.rank, exc_info=True)
    # Nothing is left to be saved; see `process.loop.engine_main`.
    sys.stdout.flush()
    os._exit(status)

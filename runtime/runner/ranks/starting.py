"""Starts the processes of ranks on this machine, hears of their ends, and ends them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from signal import Signals

import torch

from coppice.runtime.config import EngineConfig
from coppice.runtime.runner.ranks.cores import divided_cores, give_back_cores, take_cores
from coppice.runtime.runner.ranks.ending import EndingGroup
from coppice.runtime.runner.ranks.shared_group import SharedGroup
from coppice.runtime.runner.ranks.torch_group import TorchGroup

# Seconds that a process may take to end after the group has.
_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a rank's process is told first.

    Attributes:
        config: the engine's options.
        rank, size: its number, and how many ranks there are.
        descriptor, region_bytes: the memory that the ranks share (``RankMemory``).
        cores: those that it may use; None: all.
        init_method: where GPUs find each other; None for ranks on a CPU.
    """

    config: EngineConfig
    rank: int
    size: int
    descriptor: int
    region_bytes: int
    cores: list[int] | None
    init_method: str | None

    def take_device(self) -> bool:
        """Begins to use this rank's GPU; False if it has none. Raises what CUDA raises."""
        if self.init_method is None:
            return False
        torch.cuda.set_device(self.rank)
        torch.cuda.mem_get_info()
        return True

    def join(self, held: ExitStack) -> EndingGroup:
        """The group, as this rank has it; waits for all ranks on GPUs."""
        from coppice.kernels.cpu.ranks.memory import RankMemory

        memory = RankMemory(self.descriptor, self.rank, self.size, self.region_bytes)
        if self.init_method is None:
            return SharedGroup(memory, self.rank, self.size, held)
        device = torch.device("cuda", self.rank)
        return TorchGroup(
            self.rank, self.size, device, held,
            init_method=self.init_method, mailbox=memory, in_order=self.config.deterministic,
        )  # fmt: skip


def start_ranks(config: EngineConfig, device: torch.device, numbers: int, main: str) -> EndingGroup:
    """Starts all ranks but the first, which is this process, and returns its group.

    Args:
        config: the engine's options, with ``tensor_parallel_size``.
        device: "cpu", or "cuda" for a GPU each.
        numbers: the most float32 numbers that a rank brings to a meeting.
        main: ``module:function`` that a rank's process calls with its connection to this one.

    Raises ValueError if there are fewer GPUs than ranks, RuntimeError with the reason if the
    process of one can't use its GPU.
    """
    # It loads compiled code, which engines of one rank do not need.
    from coppice.kernels.cpu.ranks.memory import region_bytes, shared_file

    size, gpu = config.tensor_parallel_size, device.type == "cuda"
    if gpu and torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size is {size}; on GPUs it must be at most their number, "
            f"{torch.cuda.device_count()}"
        )
    room = region_bytes(1 if gpu else numbers)
    descriptor = shared_file(size, room)
    with ExitStack() as held:
        held.callback(os.close, descriptor)
        cores = None if gpu else divided_cores(size)
        init_method = f"tcp://127.0.0.1:{_free_port()}" if gpu else None
        told = [
            Assignment(config, rank, size, descriptor, room, own, init_method)
            for rank, own in enumerate([None] * size if cores is None else cores)
        ]
        # Before this process is bound to its cores, which the others would inherit.
        ranks = [_Rank(each, main, held) for each in told[1:]]
        if cores is not None:
            held.callback(give_back_cores, os.sched_getaffinity(0), torch.get_num_threads())
            take_cores(cores[0])
        for each in ranks if gpu else ():
            each.await_ready()  # one that has ended would be waited for in `join`
        started = ExitStack()
        group = told[0].join(started)
        started.enter_context(held.pop_all())
        for each in ranks:
            each.watch(group)
        return group


class _Rank:
    """The process of one rank."""

    def __init__(self, told: Assignment, main: str, held: ExitStack) -> None:
        """Starts it; ``held`` ends it."""
        self._rank = told.rank
        self._connection, theirs = Pipe()
        module, _, function = main.partition(":")
        code = f"from {module} import {function}; {function}({theirs.fileno()})"
        self._process = subprocess.Popen(
            # Without the current folder on the path, whose folders may hide packages.
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), told.descriptor),
        )
        held.callback(self._end)
        theirs.close()
        with suppress(OSError):  # it has ended: `watch` says so
            self._connection.send(told)

    def await_ready(self) -> None:
        """Waits until the process is about to join. Raises RuntimeError with why it does not."""
        if (reason := self._heard()) is not None:
            raise RuntimeError(f"rank {self._rank} of the model: {reason}")

    def watch(self, group: EndingGroup) -> None:
        """Ends the group, with the reason, when the process ends or says that it fails."""
        threading.Thread(
            target=self._watch, args=(group,), name=f"coppice-rank-{self._rank}", daemon=True
        ).start()

    def _watch(self, group: EndingGroup) -> None:
        reason = self._heard()
        self._connection.close()
        group.end(f"rank {self._rank} of the model: {reason}")

    def _heard(self) -> str | None:
        """Waits for what makes the process fail, or its end; None: it is ready (`await_ready`)."""
        with suppress(EOFError, OSError):
            said: str | None = self._connection.recv()
            return said
        code = self._process.wait()
        if code >= 0:
            return f"its process ended with status {code}"
        known = -code in list(Signals)
        return f"its process was killed by {Signals(-code).name if known else -code}"

    def _end(self) -> None:
        with suppress(OSError):
            self._connection.send(None)  # which tells the process to end
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def leave_with_parent(connection: Connection) -> None:
    """Ends this process when the other end of a connection says so, or is closed.

    A thread of its own waits for that.
    """

    def wait() -> None:
        with suppress(EOFError, OSError):
            connection.recv()
        os._exit(0)

    threading.Thread(target=wait, name="coppice-parent", daemon=True).start()

"""The processes of a GPU suite: one measures, the other watches it and goes on after a failure.

A kernel that reads invalid memory makes the GPU unusable for its process, and one that never ends
cannot be interrupted. So parts run in a separate process. When it ends or is killed, a new one runs
the remaining parts.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]
#: Seconds that a process may take to start, and a part after its own time limit.
START_SECONDS, GRACE_SECONDS = 90.0, 30.0


class Part(Protocol):
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a process is started with, beside its end of the connection."""

    names: tuple[str, ...]  # of the parts to run, in order
    folder: Path
    quick: bool
    limit: float  # seconds left for all
    roofs: dict[str, float]


def run_parts(
    parts: Sequence[Part],
    serve: Callable[[Connection, Plan], None],
    add: Callable[[Row], None],
    *,
    folder: Path,
    quick: bool,
    limit: float,
) -> None:
    """Runs all parts in order within `limit` seconds, and passes their rows to `add`.

    `serve` runs in the process that measures. A part that fails or hangs becomes a row with
    `error`, one for which no time is left a row with `left_out`.
    """
    end = time.monotonic() + limit
    pending = list(parts)
    roofs: dict[str, float] = {}
    while pending and time.monotonic() < end:
        plan = Plan(
            tuple(part.name for part in pending), folder, quick, end - time.monotonic(), roofs
        )
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(serve, theirs, plan), daemon=True
        )
        process.start()
        theirs.close()
        running: Part | None = None
        until = time.monotonic() + START_SECONDS
        error = ""
        while pending:
            if not ours.poll(max(0.0, min(until, end) - time.monotonic())):
                over = running.seconds if running else START_SECONDS
                error = f"stopped: it took longer than its {over:g} s"
                if time.monotonic() >= end:
                    error = "stopped: the suite's time was over"
                break
            try:
                kind, value = ours.recv()
            except (EOFError, OSError):
                process.join(5)
                error = f"its process ended with {process.exitcode}"
                break
            if kind == "begin":
                running = next(part for part in pending if part.name == value)
                until = time.monotonic() + running.seconds + GRACE_SECONDS
            elif kind == "roofs":
                roofs = value
            elif kind == "row":
                add({"part": running.name if running else "", **value})
            else:  # "end" of this part, or "last": the process ends with this part
                pending.remove(running)
                running, until = None, time.monotonic() + START_SECONDS
                if kind == "last":
                    break
        process.kill()
        process.join(10)  # it may never end while the GPU hangs
        if error:
            failed = running or pending[0]
            pending.remove(failed)
            add({"part": failed.name, "error": error})
    for part in pending:
        add({"part": part.name, "left_out": f"the suite's {limit:g} s were over"})


def _run(serve: Callable[[Connection, Plan], None], connection: Connection, plan: Plan) -> None:
    os.dup2(2, 1)  # standard output is for rows, and libraries print to it
    serve(connection, plan)
    connection.close()
    os._exit(0)  # threads of libraries may never end


class Measuring(Protocol):
    """What the parts of a process share: the roofs measured so far, and the device."""

    roofs: dict[str, float]

    def works(self) -> bool:
        """Whether the device still computes after a part has failed."""


def serve_parts(
    connection: Connection,
    plan: Plan,
    parts: Mapping[str, Callable[[], Iterable[Row]]],
    bench: Measuring,
    *,
    common: Row | None = None,
    must_exit: Callable[[], bool] = lambda: False,
) -> None:
    """Runs the parts of a plan in order and sends their rows, each with the keys of `common`.

    A part that raises becomes a row with `error`. When the device is lost or `must_exit()` is true,
    this returns early: the process ends, and another one runs the remaining parts.
    """
    import torch

    common = common or {}
    for name in plan.names:
        connection.send(("begin", name))
        last = False
        try:
            for row in parts[name]():
                connection.send(("row", row | common))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{frame.name}, line {frame.lineno}"
            connection.send(("row", {"error": reason(error), "at": at} | common))
            last = isinstance(error, torch.AcceleratorError) or not bench.works()
        connection.send(("roofs", bench.roofs))
        last = last or must_exit()
        connection.send(("last" if last else "end", name))
        if last:
            break


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"

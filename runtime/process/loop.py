"""Runs an engine in its own process: calls come in by a channel, answers and outputs go out.

`messages` lists what is sent.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.process.channel import Channel
from coppice.runtime.process.messages import PING, Leaving, Pulse, Ready, step_row
from coppice.runtime.process.service import EngineService
from coppice.runtime.requests.request import DeviceLost

logger = logging.getLogger(__name__)

#: The exit status of a process whose device has failed for good.
LOST_STATUS = 3


class EngineLoop:
    """Runs an engine: calls between the steps, steps while there is anything to do.

    Args:
        service: the engine and what may be called.
        channel: brings calls, takes outputs.
        answers: takes the answers of calls and pings.
    """

    def __init__(self, service: EngineService, channel: Channel, answers: Channel) -> None:
        self._service = service
        self._engine = service.engine
        self._channel = channel
        self._answers = answers
        self._turn, self._busy, self._warm = 0, False, False  # see `Pulse`
        self._calls: deque[tuple[int | None, str, tuple[Any, ...], dict[str, Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._lost = False  # a rank of the model has ended

    def run(self) -> None:
        """Runs until the other end asks it to stop, or is closed; closes both channels.

        Raises what a broken step raises; a DeviceLost is reported to the other end first.
        """
        config = self._engine.model_config
        self._channel.send(
            Ready(
                str(self._engine.memory),
                self._engine.max_model_len,
                config.vocab_size,
                self._engine.runner.recipe,
                self._engine.config.enable_prefix_caching,
                config.implementation,
            )
        )
        reader = threading.Thread(target=self._read, name="coppice-reader", daemon=True)
        reader.start()
        try:
            self._engine.when_lost(self._be_woken)
            while self._take_calls():
                self._engine.check_device()
                if self._engine.has_unfinished():
                    outputs = self._engine.step()
                    self._warm = True
                    if outputs:
                        self._channel.send([step_row(output) for output in outputs])
        except DeviceLost as error:
            self._channel.send(Leaving(str(error)))
            raise
        finally:
            self._answers.close()
            self._channel.close()
            reader.join()

    def _read(self) -> None:
        try:
            while True:
                items = self._channel.receive()
                if PING in items:
                    self._answers.send(Pulse(self._turn, self._busy, self._warm))
                    items = [item for item in items if item != PING]
                with self._wake:
                    self._calls.extend(item for item in items if item is not None)
                    self._stopping |= None in items
                    self._wake.notify()
        except EOFError:
            with self._wake:
                self._stopping = True
                self._wake.notify()

    def _be_woken(self) -> None:
        with self._wake:
            self._lost = True
            self._wake.notify()

    def _take_calls(self) -> bool:
        """Answers all calls; waits for one while no step is due. False: it should stop."""
        with self._wake:
            while not (
                self._calls or self._stopping or self._lost or self._engine.has_unfinished()
            ):
                self._busy = False
                self._wake.wait()
            if self._stopping:
                return False
        self._turn += 1
        self._busy = True
        while self._calls:
            number, method, args, kwargs = self._calls.popleft()
            try:
                result, failed = self._service.call(method, args, kwargs), False
                if result is not None:
                    pickle.dumps(result)  # here, where a failure can still be answered
            except Exception as error:
                result, failed = _portable(error), True
                if number is None:
                    logger.exception("%s failed", method)
            if number is not None:
                self._answers.send((number, failed, result))
        return True


def _portable(error: Exception) -> Exception:
    """The exception if it can be pickled, else a RuntimeError with its type and text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def engine_main(
    config: EngineConfig, connection: Connection, answers: Connection, more: Mapping[str, Any]
) -> None:
    """The main function of the engine's process; `more` are further arguments of `Engine`.

    Calls come in by `connection`, which also takes the outputs; their answers go to `answers`.

    If the model can't be loaded, the exception is sent instead of `Ready`. A step that breaks ends
    the process with an error, from which its parent knows that it must start another; a device that
    has failed for good ends it with `LOST_STATUS`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the whole group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()  # a crash in native code prints its call stack
    channel, status = Channel(connection), 0
    try:
        engine = Engine(config, **more)
    except Exception as error:
        channel.send(_portable(error))
        channel.close()
    else:
        gc.freeze()  # what is loaded stays: no collection needs to scan it
        try:
            EngineLoop(EngineService(engine), channel, Channel(answers)).run()
        except DeviceLost:
            logger.exception("the engine's process ends")
            status = LOST_STATUS
    logging.shutdown()
    # Nothing is left to be saved. An orderly end would run the destructors of native libraries
    # whose threads still wait, and sometimes one of them aborts the process because of that.
    os._exit(status)

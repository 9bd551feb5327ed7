"""The engine's step loop behind a channel: calls come in, answers and each step's outputs go out.

This is what runs in the engine's own process. What travels is plain:

    in    (number, method, args, kwargs)   a call of a public method of the engine; number None:
                                           nobody waits for the answer. None: time to end
    out   Ready                            the model is loaded
          (number, failed, result)         the answer of a call, or the exception that it raised
          [row, ...]                       outputs of a step, to be read with `step_output`
          Leaving                          the process ends, and why
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
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from coppice.runtime.channel import Channel
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine import Engine
from coppice.runtime.request import DeviceLost, StepOutput

logger = logging.getLogger(__name__)

#: With what a process ends whose device has failed for good.
LOST_STATUS = 3

# A dataclass takes ten times as long to pickle as the tuple of its fields. Most outputs are new
# tokens of a sequence that goes on: those travel without the fields that say nothing.
_FIELDS = [each.name for each in fields(StepOutput)]
_whole_row = attrgetter(*_FIELDS)
_SHORT = ("request_id", "index", "new_token_ids", "num_prompt_tokens", "cached_tokens")
_short_row = attrgetter(*_SHORT)


@dataclass(frozen=True)
class Ready:
    """What the other side should know of an engine that has been loaded."""

    memory: str  # the arithmetic of its memory
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int


@dataclass(frozen=True)
class Leaving:
    """The last word of a process that cannot go on: another one may."""

    reason: str


def step_row(output: StepOutput) -> tuple[Any, ...]:
    """An output as it travels."""
    whole = (
        output.finish_reason is not None
        or output.logprobs is not None
        or output.prompt_logprobs is not None
        or output.best_so_far is not None
    )
    return _whole_row(output) if whole else _short_row(output)


def is_short(row: tuple[Any, ...]) -> bool:
    """Whether the row only says which request, which sequence of it, and its new tokens."""
    return len(row) == len(_SHORT)


def step_output(row: tuple[Any, ...]) -> StepOutput:
    """The output that a row stands for."""
    if is_short(row):
        request_id, index, tokens, prompt_tokens, cached = row
        return StepOutput(request_id, index, tokens, None, None, None, prompt_tokens, cached)
    return StepOutput(*row)


class EngineLoop:
    """Runs an engine: calls between the steps, steps while there is anything to do."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._calls: deque[tuple[int | None, str, tuple[Any, ...], dict[str, Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False

    def run(self) -> None:
        """Until the other end says so, or is gone; closes the channel.

        Raises what a broken step raises; if that is DeviceLost, the other end has been told.
        """
        config = self._engine.model_config
        self._channel.send(
            Ready(str(self._engine.memory), self._engine.max_model_len, config.vocab_size)
        )
        reader = threading.Thread(target=self._read, name="coppice-reader", daemon=True)
        reader.start()
        try:
            while self._take_calls():
                if self._engine.has_unfinished():
                    outputs = self._engine.step()
                    if outputs:
                        self._channel.send([step_row(output) for output in outputs])
        except DeviceLost as error:
            self._channel.send(Leaving(str(error)))
            raise
        finally:
            self._channel.close()
            reader.join()

    def _read(self) -> None:
        try:
            while True:
                items = self._channel.receive()
                with self._wake:
                    self._calls.extend(item for item in items if item is not None)
                    self._stopping |= None in items
                    self._wake.notify()
        except EOFError:
            with self._wake:
                self._stopping = True
                self._wake.notify()

    def _take_calls(self) -> bool:
        """Answers all calls, waiting for one if there is nothing to step; False: time to end."""
        with self._wake:
            while not (self._calls or self._stopping or self._engine.has_unfinished()):
                self._wake.wait()
            if self._stopping:
                return False
        while self._calls:
            number, method, args, kwargs = self._calls.popleft()
            try:
                function = getattr(self._engine, method, None)
                if method.startswith("_") or not callable(function):
                    raise ValueError(
                        f"method must be a public method of the engine, got {method!r}"
                    )
                result, failed = function(*args, **kwargs), False
                if result is not None:
                    pickle.dumps(result)  # here, where it can still be answered with an error
            except Exception as error:
                result, failed = _portable(error), True
                if number is None:
                    logger.exception("%s failed", method)
            if number is not None:
                self._channel.send((number, failed, result))
        return True


def _portable(error: Exception) -> Exception:
    """The exception itself if it survives a pipe, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def engine_main(config: EngineConfig, connection: Connection, more: Mapping[str, Any]) -> None:
    """The main function of the engine's process; `more` are further arguments of `Engine`.

    A model that can't be loaded is answered with the exception in the place of `Ready`. A step that
    breaks ends the process with an error, so that whoever started it sees that and starts another;
    so does a device that has failed for good, with `LOST_STATUS`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the whole group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()  # a crash in native code says on stderr where it was called from
    channel, status = Channel(connection), 0
    try:
        engine = Engine(config, **more)
    except Exception as error:
        channel.send(_portable(error))
        channel.close()
    else:
        gc.freeze()  # what is loaded stays: no collection needs to look through it
        try:
            EngineLoop(engine, channel).run()
        except DeviceLost:
            logger.exception("the engine's process ends")
            status = LOST_STATUS
    logging.shutdown()
    # Nothing is left to be saved. An orderly end would run the destructors of native libraries
    # whose threads still wait, and now and then one of them aborts the process over that.
    os._exit(status)

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
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import xxhash

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.engine.tiering import digest_of_weights
from coppice.runtime.metrics.events.teller import Teller
from coppice.runtime.process.callers import Caller, Callers
from coppice.runtime.process.channel import Channel
from coppice.runtime.process.messages import PING, Door, End, Leaving, Pulse, Ready
from coppice.runtime.process.service import EngineService
from coppice.runtime.process.sockets import Listener, MessageSocket
from coppice.runtime.requests.request import DeviceLost

logger = logging.getLogger(__name__)

#: Number (None: no answer is wanted), method, arguments.
_Call: TypeAlias = tuple[int | None, str, tuple[Any, ...], dict[str, Any]]

#: The exit status of a process whose device has failed for good.
LOST_STATUS = 3


class EngineLoop:
    """Runs an engine: calls between the steps, steps while there is anything to do.

    Args:
        service: the engine and what may be called.
        channel: brings calls, takes outputs.
        answers: takes the answers of calls and pings.
        host: the address at which other processes may connect and call, too; None: none may.
    """

    def __init__(
        self, service: EngineService, channel: Channel, answers: Channel, host: str | None = None
    ) -> None:
        self._service = service
        self._engine = service.engine
        self._callers = Callers(Caller(channel, answers))
        self._teller: Teller | None = None  # once a caller has subscribed
        self._host = host
        self._weights = ""  # their digest, where others may connect
        self._turn, self._busy, self._warm = 0, False, False  # see `Pulse`
        self._calls: deque[tuple[Caller, _Call]] = deque()
        self._new: deque[MessageSocket] = deque()  # of those who have connected
        self._gone: deque[Caller] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._end = End()  # if nobody says how
        self._lost = False  # a rank of the model has ended
        self._unheard = False  # events are to be published again

    def run(self) -> None:
        """Runs until the other end asks it to stop, or is closed; closes both channels.

        Then the engine has stored in tiers what there is time for. Raises what a broken step
        raises; a DeviceLost is reported to the other end first.
        """
        parent, listener, door = self._callers.parent, None, None
        if self._host is not None:
            listener = Listener(self._host, self._admit)
            door = Door(listener.port, listener.key)
            self._weights = digest_of_weights(self._engine.config, self._engine.runner).hex()
        parent.channel.send(replace(self._ready(), door=door))
        reader = self._reader(parent)
        try:
            self._engine.when_lost(self._be_woken)
            self._engine.events.when_broken = self._be_heard
            while self._take_calls():
                self._engine.check_device()
                if self._engine.has_unfinished():
                    outputs = self._engine.step()
                    self._warm = True
                    if outputs:
                        self._callers.send(outputs)
            self._engine.end_tiers(self._end.seconds)
            self._engine.end_ranks()
        except DeviceLost as error:
            parent.channel.send(Leaving(str(error)))
            raise
        finally:
            if listener is not None:
                listener.close()
            if self._teller is not None:
                self._engine.events.remove(self._teller)
            self._callers.close()
            reader.join()

    def _ready(self) -> Ready:
        engine = self._engine
        model, config = engine.model_config, engine.config
        kind = repr(model).encode()
        return Ready(
            str(engine.memory),
            engine.max_model_len,
            model.vocab_size,
            engine.runner.recipe,
            config.enable_prefix_caching,
            model.implementation,
            xxhash.xxh3_64_hexdigest(kind),
            self._weights,
            config.most_seqs,
        )

    def _reader(self, caller: Caller) -> threading.Thread:
        """Starts the thread that reads the calls of one caller."""
        thread = threading.Thread(
            target=self._read, args=(caller,), name="coppice-reader", daemon=True
        )
        thread.start()
        return thread

    def _read(self, caller: Caller) -> None:
        try:
            while True:
                items = caller.channel.receive()
                if PING in items:
                    caller.answers.send(Pulse(self._turn, self._busy, self._warm))
                    items = [item for item in items if item != PING]
                ends = [item for item in items if isinstance(item, End)]
                with self._wake:
                    self._calls.extend((caller, item) for item in items if item not in ends)
                    if ends:
                        if caller is self._callers.parent:
                            self._end = ends[-1]
                        raise EOFError("it wants to end")
                    self._wake.notify()
        except Exception as error:
            if not isinstance(error, EOFError):
                logger.exception("what a caller sent cannot be read")
            with self._wake:
                if caller is self._callers.parent:
                    self._stopping = True
                else:
                    self._gone.append(caller)
                self._wake.notify()

    def _admit(self, connection: MessageSocket) -> None:
        """Takes another caller; from any thread."""
        with self._wake:
            self._new.append(connection)
            self._wake.notify()

    def _come_and_gone(self) -> None:
        """Admits those who have connected, and ends the requests of those who have gone."""
        while self._new:
            caller = self._callers.add(Channel(self._new.popleft()))
            caller.channel.send(self._ready())
            self._reader(caller)
        while self._gone:
            caller = self._gone.popleft()
            if self._teller is not None:
                self._teller.remove(caller.tell)
            self._callers.remove(caller, self._engine.abort, self._engine.unfinished)
            self._engine.events.flush()  # there may be no step soon
            # A thread that still writes to it must not hold up the engine.
            threading.Thread(target=caller.channel.close, daemon=True).start()

    def _subscribe(self, caller: Caller) -> None:
        if self._teller is None:
            self._teller = Teller()
            self._engine.events.add(self._teller)
        self._teller.add(caller.tell)
        self._engine.events.flush()

    def _be_woken(self) -> None:
        with self._wake:
            self._lost = True
            self._wake.notify()

    def _be_heard(self) -> None:
        with self._wake:
            self._unheard = True
            self._wake.notify()

    def _due(self) -> bool:
        """Whether there is anything to do."""
        return bool(
            self._calls
            or self._new
            or self._gone
            or self._stopping
            or self._lost
            or self._unheard
            or self._engine.has_unfinished()
        )

    def _take_calls(self) -> bool:
        """Answers all calls; waits for one while no step is due. False: it should stop."""
        pause = self._engine.between()
        with self._wake:
            if not self._due():
                self._busy = False
                self._wake.wait_for(self._due, pause)
            if self._stopping:
                return False
        self._turn += 1
        self._busy = True
        if self._unheard:
            self._unheard = False
            self._engine.events.flush()
        self._come_and_gone()
        while self._calls:
            caller, (number, method, args, kwargs) = self._calls.popleft()
            if self._callers.in_vain(caller, method):
                continue
            try:
                result: Any = None
                failed = False
                if method == "subscribe":
                    self._subscribe(caller)
                elif method == "introduce":
                    caller.name = str(args[0])
                elif method == "callers":
                    result = self._callers.names
                else:
                    args = caller.within(method, args)
                    result = self._service.call(method, args, kwargs)
                if result is not None:
                    pickle.dumps(result)  # here, where a failure can still be answered
            except Exception as error:
                result, failed = _portable(error), True
                if number is None:
                    logger.exception("%s failed", method)
            if number is not None:
                caller.answers.send((number, failed, result))
        return True


def _portable(error: Exception) -> Exception:
    """The exception if it can be pickled, else a RuntimeError with its type and text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def engine_main(
    config: EngineConfig,
    connection: Connection,
    answers: Connection,
    more: Mapping[str, Any],
    host: str | None = None,
) -> None:
    """The main function of the engine's process; `more` are further arguments of `Engine`.

    Calls come in by `connection`, which also takes the outputs; their answers go to `answers`.
    With `host` others can connect there, too (see `Ready.door`).

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
        engine.warm_up()
    except Exception as error:
        channel.send(_portable(error))
        channel.close()
    else:
        # systemd and torchrun send it to the whole group; the parent has requests to end first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gc.freeze()  # what is loaded stays: no collection needs to scan it
        try:
            EngineLoop(EngineService(engine), channel, Channel(answers), host).run()
        except DeviceLost:
            logger.exception("the engine's process ends")
            status = LOST_STATUS
    logging.shutdown()
    # Nothing is left to be saved. An orderly end would run the destructors of native libraries
    # whose threads still wait, and sometimes one of them aborts the process because of that.
    os._exit(status)

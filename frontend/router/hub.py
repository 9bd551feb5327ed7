"""Many replicas that look like one engine: each request goes to one of them, as the router decides.

    client    calls ->  | Hub: route, send ->   replica's engine
              rows  <-  |      rows, told <-    (one connection each)

Who calls also decides where the call goes; a thread of the hub reads from all connections. One lock
is for all that the two change: members, calls, requests (`flights`) and what is asked of all
replicas (`gather`).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from coppice.frontend.errors import EngineStopped
from coppice.frontend.router.calls import Calls
from coppice.frontend.router.choosing.namespaces import place_of
from coppice.frontend.router.choosing.policy import Router
from coppice.frontend.router.client_ends import Answers, Outputs
from coppice.frontend.router.connections import Connections
from coppice.frontend.router.flights import ADDING, Flight, Flights
from coppice.frontend.router.gather import GATHERED, Gathering, Gatherings
from coppice.frontend.router.members import Members
from coppice.frontend.router.replica import Replica
from coppice.runtime.process.messages import PING, Door, End, Leaving, Pulse, Told
from coppice.runtime.requests.request import Unfinished

log = logging.getLogger(__name__)

_DUE_SECONDS = 0.5  # between two looks at the clock while something waits
_AT_ONCE = 200  # changes of a tree that are applied while no call can be routed
_WHILE_IDLE = ("reset_cache", "sleep")  # calls that engines refuse while requests run


class Hub:
    """What an `EngineClient` launches as its engine; replicas come and go while it runs.

    What becomes of the requests of a replica that ends is said in `flights`.

    Attributes:
        name: by which replicas know it.
        router: decides.
        restarts: replicas that have come in place of others that had ended by themselves.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, router: Router | None = None
    ) -> None:
        """`clock` gives seconds; `router`: another one than `Router(clock)`."""
        self.name = secrets.token_hex(8)
        self.router = router or Router(clock)
        self.restarts = 0
        self._missing = 0  # replicas that have ended by themselves, and are not replaced yet
        self._clock = clock
        self._answers, self._outputs = Answers(), Outputs(self.take, self.kill)
        self._lock = threading.RLock()  # for the next four, the router and replicas' attributes
        self._calls, self._members = Calls(), Members(self.router, clock)
        self._flights = Flights(
            self.router, self._members, self._calls, self._answers, self._outputs, clock
        )
        self._gatherings = Gatherings(self._members, self._calls, self._answers, clock)
        self._connections = Connections()
        self._closed = threading.Event()

    # -- replicas, from any thread ---------------------------------------------------------------

    def join(self, name: str, host: str, door: Door) -> None:
        """Connects to a replica, which gets requests from now on.

        Raises OSError if it can't be reached, and ValueError if it is not like the others.
        """
        replica = Replica.connected(name, (host, door.port), door.key)
        try:
            with self._lock:
                if self._closed.is_set():
                    raise ConnectionAbortedError("the hub is closed")
                first = self._members.model is None
                self._members.add(replica)
                replica.send((None, "introduce", (self.name,), {}))
                replica.send((None, "subscribe", (), {}))
                self._gatherings.join(replica)
                if self._missing:
                    self._missing -= 1
                    self.restarts += 1
                if first:
                    self._outputs.put(self._members.model)
                self._connections.add(replica)
                self._flights.send_parked()
        except BaseException:
            replica.cut()
            replica.close()
            raise
        log.info("replica %s takes requests", name)
        self._connections.wake()

    def drain(self, name: str, emptied: Callable[[], object] = lambda: None) -> None:
        """Sends no more requests to a replica; `emptied` is called when its last one has ended."""
        with self._lock:
            there = self._members.drain(name, emptied)
        if not there:
            emptied()

    def leave(self, name: str, reason: str) -> None:
        """Takes note that a replica is gone."""
        with self._lock:
            replica = self._members.by_name.get(name)
            if replica is not None:
                self._gone(replica, reason)

    @property
    def names(self) -> list[str]:
        """The replicas that take requests."""
        with self._lock:
            return sorted(each.name for each in self._members.taking)

    @property
    def trouble(self) -> str | None:
        """Why no replica takes requests; None if one does, or did a moment ago.

        Others may be about to come, as in an update; requests wait for them.
        """
        with self._lock:
            return self._members.trouble

    # -- as an engine that was launched ----------------------------------------------------------

    def channels(self) -> tuple[Outputs, Answers]:
        """The client's ends; from now on the hub reads what replicas send."""
        threading.Thread(target=self._run, name="coppice-hub", daemon=True).start()
        return self._outputs, self._answers

    def wait(self, timeout: float | None = None) -> str | None:
        """Waits until it is closed."""
        return "it was closed" if self._closed.wait(timeout) else None

    def kill(self) -> None:
        """Closes it. The replicas abort what they have of it."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            replicas = self._members.remove_all()
        for replica in replicas:
            replica.cut()
        self._answers.put(None)
        self._outputs.end()
        self._connections.wake()

    # -- what the client sends -------------------------------------------------------------------

    def take(self, item: Any) -> None:
        """Takes one message of the client, from any thread."""
        if isinstance(item, End):  # replicas write their tiers when they end themselves
            self.kill()
        elif item == PING:
            self._answers.put(Pulse(0, False, True))
        else:
            number, method, args, kwargs = item
            with self._lock:
                try:
                    self._call(number, method, args, kwargs)
                except Exception as error:
                    log.exception("%s could not be sent to a replica", method)
                    self._answers.answer(number, True, error)

    def _call(
        self, number: int | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if method in ADDING:
            self._flights.add(number, method, args, kwargs)
            self._wake_if_parked()
        elif method == "abort":
            self._flights.abort(*args)
        elif method == "again":
            self._flights.again(args[0])
            self._wake_if_parked()
        elif method == "peek":
            self._peek(number, args, kwargs)
        elif method in _WHILE_IDLE and self._flights:
            # An engine without requests would do it, and only the others would refuse.
            count = len(self._flights)
            error = Unfinished(f"{method}: refused while {count} requests are unfinished")
            self._answers.answer(number, True, error)
        elif method in GATHERED:
            self._gatherings.begin(number, method, args, kwargs)
            self._connections.wake()  # so that the deadline is seen
        else:
            names = ", ".join([*ADDING, "abort", "peek", *sorted(GATHERED - {"check"}), "check"])
            unknown = ValueError(f"method must be one of {names}, got {method!r}")
            self._answers.answer(number, True, unknown)

    def _wake_if_parked(self) -> None:
        """Has the thread look at the clock if a request waits for a replica."""
        if self._flights.parked:
            self._connections.wake()

    def _peek(self, number: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        choice = self.router.choose(args[0], place_of(kwargs))
        if choice is None:
            error = EngineStopped("no replica is there to be asked")
            self._answers.answer(number, True, error)
            return
        replica = self._members.by_number[choice.replica]
        self._calls.send(replica, number, "peek", args, kwargs)

    # -- what replicas send ----------------------------------------------------------------------

    def _run(self) -> None:
        """Reads from all connections until the hub is closed; in a thread of its own."""
        while not self._closed.is_set():
            with self._lock:
                while (replica := self._connections.joined()) is not None:
                    if replica in self._members:
                        self._connections.watch(replica)
                        self._read(replica)  # what came before
                    else:
                        replica.close()
                due = bool(self._calls or self._flights.parked)
            for replica in self._connections.wait(_DUE_SECONDS if due else None):
                self._read(replica)
            if due:
                self._check_deadlines()
        self._connections.close()

    def _read(self, replica: Replica) -> None:
        reason = "its engine ended"
        try:
            for item in replica.come():
                if isinstance(item, list):
                    with self._lock:
                        kept = self._flights.take_rows(replica, item)
                    if kept:
                        self._outputs.put(kept)
                elif isinstance(item, Told):
                    self._take_told(replica, item)
                elif isinstance(item, Leaving):
                    reason = item.reason
                elif isinstance(item, tuple):
                    with self._lock:
                        replica.late = False
                        self._take_answer(*item)
                        if replica in self._members:  # else its number may be another one's
                            self.router.heard(replica.number)
        except Exception as error:
            if not isinstance(error, EOFError | OSError):
                log.exception("what replica %s sent can't be used", replica.name)
            self._connections.forget(replica)
            with self._lock:
                if replica in self._members:
                    self._gone(replica, reason)
            replica.close()

    def _take_told(self, replica: Replica, told: Told) -> None:
        for begin in range(0, len(told.changes), _AT_ONCE):
            with self._lock:
                if replica not in self._members:  # its number may be another one's
                    return
                self.router.apply(replica.number, told.changes[begin : begin + _AT_ONCE])
        if told.load is not None:
            with self._lock:
                if replica not in self._members:
                    return
                self.router.measured(replica.number, told.load.prefill_tokens_a_second)

    def _take_answer(self, sent: int, failed: bool, result: Any) -> None:
        call = self._calls.answered(sent)
        if call is None:
            return
        replica, waits = call
        if isinstance(waits, Gathering):
            self._gatherings.take(waits, replica, failed, result)
        elif isinstance(waits, Flight):
            self._flights.take_verdict(waits, replica, failed, result)
        elif isinstance(waits, int):  # the number of the client's own call
            self._answers.answer(waits, failed, result)

    def _gone(self, replica: Replica, reason: str) -> None:
        """Sends what a replica had not answered to others, and tells the client of the rest."""
        self._members.remove(replica)
        replica.cut()
        text = f"replica {replica.name} ended: {reason}"
        if replica.draining and not replica.flights:
            log.info("%s", text)
        else:
            log.error("%s; requests that it had: %d", text, len(replica.flights))
        if not replica.draining:
            self._missing += 1
        for _, waits in self._calls.drop(lambda whose, _: whose is replica):
            if isinstance(waits, int):
                self._answers.answer(waits, True, EngineStopped(text))
        self._flights.leave(replica, text)
        self._members.check_emptied(replica)
        self._gatherings.leave(replica)
        self._connections.wake()

    def _check_deadlines(self) -> None:
        now = self._clock()
        with self._lock:
            self._gatherings.check_deadlines(now)
            self._flights.check_patience(now)

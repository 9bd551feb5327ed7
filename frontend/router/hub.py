"""Many replicas that look like one engine: each request goes to one of them, as the router decides.

    client    calls ->  | Hub: route, send ->   replica's engine
              rows  <-  |      rows, told <-    (one connection each)

Who calls also decides where the call goes; a thread of the hub reads from all connections.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from itertools import count
from queue import SimpleQueue
from typing import Any

from coppice.frontend.errors import EngineStopped
from coppice.frontend.router.gather import GATHERED, Gathering, Kept
from coppice.frontend.router.policy import Router
from coppice.frontend.router.replica import Replica
from coppice.radix.mirror.changes import Change, Opened
from coppice.runtime.process.messages import (
    PING,
    Door,
    End,
    Leaving,
    Lost,
    Pulse,
    Ready,
    Told,
    is_short,
    step_output,
)
from coppice.runtime.report.merged import merged_stats
from coppice.runtime.report.snapshot import EngineStats
from coppice.runtime.requests.request import QueueFull

log = logging.getLogger(__name__)

GRACE = 10.0  # seconds without a replica after which new requests are refused
PATIENCE = 60.0  # seconds for which a request without an answer waits while there is no replica
GATHER_SECONDS = 10.0  # for the answers of all replicas
_DUE_SECONDS = 0.5  # between two looks at the clock while something waits
_AT_ONCE = 200  # changes of a tree that are applied while no call can be routed

_ADDING = ("add_request", "add_pooling", "add_beam_search")


@dataclass(slots=True)
class _Flight:
    """A request that has not ended.

    Attributes:
        number: of the client's call, until it is answered.
        left: sequences that have not ended; of a search, results that have not come.
        counted: whether a search has said how many results it has.
        replica: where it is; None: it waits for one.
        since: when it began to wait for a replica.
        moved: whether it has been sent to another replica since its first one ended.
        full: replicas, by their numbers, whose queues are full.
    """

    number: int | None
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    left: int = 0
    replica: Replica | None = None
    since: float = 0.0
    began: bool = False
    moved: bool = False
    counted: bool = False
    full: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        return str(self.args[0])

    @property
    def sequences(self) -> int:
        """How many it has; of a search one, until it is counted."""
        return self.args[2].num_sequences if self.method == "add_request" else 1


class Hub:
    """What an `EngineClient` launches as its engine; replicas come and go while it runs.

    A request that a replica has not answered when it ends goes to another one, once; if some of its
    answer has been shown, it fails.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, router: Router | None = None
    ) -> None:
        """`clock` gives seconds; `router`: another one than `Router(clock)`."""
        #: By which replicas know it.
        self.name = secrets.token_hex(8)
        self.router = router or Router(clock)
        self._clock = clock
        self._lock = threading.RLock()  # for all below
        self._replicas: dict[str, Replica] = {}
        self._by_number: dict[int, Replica] = {}
        self._flights: dict[str, _Flight] = {}
        self._parked: dict[str, _Flight] = {}  # without a replica
        self._lost: dict[str, _Flight] = {}  # of which the client has been told
        self._calls: dict[int, tuple[Replica, _Flight | Gathering | int]] = {}
        self._numbers = count(1)
        self._kept, self._left = Kept(), list[EngineStats]()
        self._model: Ready | None = None  # that of the first replica
        self._absent_since: float | None = None
        self._emptied: dict[str, Callable[[], object]] = {}  # of those that drain
        # -- the client's ends -----------------------------------------------------------------
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._outputs = _Outputs(self)
        self._joining: deque[Replica] = deque()  # to be read from now on
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = threading.Event()

    # -- replicas, from any thread ---------------------------------------------------------------

    def join(self, name: str, host: str, door: Door) -> None:
        """Connects to a replica, which gets requests from now on.

        Raises OSError if it can't be reached, and ValueError if it is not like the others.
        """
        replica = Replica.connected(name, (host, door.port), door.key)
        try:
            with self._lock:
                self._check(replica)
                replica.number = _free_number(self._by_number)
                self._replicas[name] = self._by_number[replica.number] = replica
                self._note_absence()
                self.router.join(replica.number, places=replica.ready.max_num_seqs)
                replica.send((None, "introduce", (self.name,), {}))
                replica.send((None, "subscribe", (), {}))
                for call in self._kept.calls():
                    replica.send(call)
                if self._model is None:
                    self._model = replace(replica.ready, door=None)
                    self._outputs.put(self._model)
                self._joining.append(replica)
                for flight in list(self._parked.values()):
                    self._send(flight)
        except BaseException:
            replica.cut()
            replica.close()
            raise
        log.info("replica %s takes requests", name)
        self._wake()

    def drain(self, name: str, emptied: Callable[[], object] = lambda: None) -> None:
        """Sends no more requests to a replica; `emptied` is called when its last one has ended."""
        with self._lock:
            replica = self._replicas.get(name)
            if replica is not None and not replica.draining:
                replica.draining = True
                self.router.leave(replica.number)
                self._emptied[name] = emptied
                self._check_emptied(replica)
                self._note_absence()
                return
        if replica is None:
            emptied()

    def leave(self, name: str, reason: str) -> None:
        """Takes note that a replica is gone."""
        with self._lock:
            replica = self._replicas.get(name)
            if replica is not None:
                self._gone(replica, reason)

    @property
    def names(self) -> list[str]:
        """The replicas that take requests."""
        with self._lock:
            return sorted(name for name, each in self._replicas.items() if not each.draining)

    @property
    def trouble(self) -> str | None:
        """Why no replica takes requests; None if one does, or did a moment ago.

        Others may be about to come, as in an update; requests wait for them.
        """
        with self._lock:
            since = self._absent_since
        if since is None or self._clock() - since < GRACE:
            return None
        return "no replica takes requests at present"

    # -- as an engine that was launched ----------------------------------------------------------

    def channels(self) -> tuple[_Outputs, _Answers]:
        """The client's ends; from now on the hub reads what replicas send."""
        threading.Thread(target=self._run, name="coppice-hub", daemon=True).start()
        return self._outputs, _Answers(self._answers)

    def wait(self, timeout: float | None = None) -> str | None:
        """Waits until it is closed."""
        return "it was closed" if self._closed.wait(timeout) else None

    def kill(self) -> None:
        """Closes it. The replicas abort what they have of it."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            replicas = list(self._replicas.values())
            self._replicas.clear()
        for replica in replicas:
            replica.cut()
        self._answers.put(None)
        self._outputs.end()
        self._wake()

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
                    self._answer(number, True, error)

    def _call(
        self, number: int | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if method in _ADDING:
            flight = _Flight(number, method, args, kwargs)
            flight.left = flight.sequences
            self._flights[flight.name] = flight
            self._send(flight)
        elif method == "abort":
            self._abort(*args)
        elif method == "again":
            flight = self._lost.pop(args[0])
            self._flights[flight.name] = flight
            flight.began, flight.moved, flight.left = False, True, flight.sequences
            self._send(flight)
        elif method == "peek":
            self._peek(number, args, kwargs)
        elif method in GATHERED:
            self._gather(number, method, args, kwargs)
        else:
            names = ", ".join([*_ADDING, "abort", "peek", *sorted(GATHERED - {"check"}), "check"])
            error = ValueError(f"method must be one of {names}, got {method!r}")
            self._answer(number, True, error)

    def _send(self, flight: _Flight) -> None:
        """Sends a request to the replica that the router chooses; without one it waits."""
        tokens, more = flight.args[1], flight.kwargs
        place, priority = _namespace(more), more.get("priority", 0)
        choice = self.router.choose(tokens, place, priority=priority, without=flight.full)
        if choice is None:
            if flight.name not in self._parked:
                flight.replica, flight.since = None, self._clock()
                flight.full = set()
                self._parked[flight.name] = flight
            return
        self._parked.pop(flight.name, None)
        replica = flight.replica = self._by_number[choice.replica]
        self.router.send(flight.name, choice, tokens, place, priority=priority)
        replica.flights.add(flight.name)
        if choice.elsewhere > choice.hit:
            more = more | {"held_elsewhere": choice.elsewhere}
        number = next(self._numbers)
        self._calls[number] = replica, flight
        replica.send((number, flight.method, flight.args, more))

    def _abort(self, name: str, index: int | None = None) -> None:
        self._lost.pop(name, None)
        if self._parked.pop(name, None) is not None:
            del self._flights[name]
            return
        flight = self._flights.get(name)
        if flight is None or flight.replica is None:
            return
        args = (name,) if index is None else (name, index)
        flight.replica.send((None, "abort", args, {}))
        flight.left -= 1
        if index is None or not flight.left:
            self._end(flight)

    def _peek(self, number: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        choice = self.router.choose(args[0], _namespace(kwargs))
        if choice is None:
            self._answer(number, True, EngineStopped("no replica is there to be asked"))
            return
        replica, sent = self._by_number[choice.replica], next(self._numbers)
        if number is not None:
            self._calls[sent] = replica, number
        replica.send((sent, "peek", args, kwargs))

    def _gather(
        self, number: int | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        deadline = self._clock() + GATHER_SECONDS
        gathering = Gathering(number, method, args, kwargs, set(self._replicas), deadline)
        for replica in self._replicas.values():
            sent = next(self._numbers)
            self._calls[sent] = replica, gathering
            replica.send((sent, method, args, kwargs))
        self._check_gathered(gathering)
        self._wake()  # so that the deadline is seen

    # -- what replicas send ----------------------------------------------------------------------

    def _run(self) -> None:
        """Reads from all connections until the hub is closed; in a thread of its own."""
        while not self._closed.is_set():
            with self._lock:
                while self._joining:
                    replica = self._joining.popleft()
                    if self._is_there(replica):
                        self._selector.register(replica, selectors.EVENT_READ, replica)
                        self._read(replica)  # what came before
                    else:
                        replica.close()
                due = bool(self._calls or self._parked)
            for key, _ in self._selector.select(_DUE_SECONDS if due else None):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                else:
                    self._read(key.data)
            if due:
                self._check_deadlines()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self._selector.close()

    def _read(self, replica: Replica) -> None:
        reason = "its engine ended"
        try:
            for item in replica.come():
                if isinstance(item, list):
                    self._take_rows(replica, item)
                elif isinstance(item, Told):
                    self._take_told(replica, item)
                elif isinstance(item, Leaving):
                    reason = item.reason
                elif isinstance(item, tuple):
                    with self._lock:
                        self._take_answer(*item)
        except Exception as error:
            if not isinstance(error, EOFError | OSError):
                log.exception("what replica %s sent can't be used", replica.name)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(replica)
            with self._lock:
                if self._is_there(replica):
                    self._gone(replica, reason)
            replica.close()

    def _take_rows(self, replica: Replica, rows: list[tuple[Any, ...]]) -> None:
        kept = []
        with self._lock:
            for row in rows:
                flight = self._flights.get(row[0])
                if flight is None or flight.replica is not replica:
                    continue
                kept.append(row)
                if not flight.began:
                    flight.began = True
                    self.router.began(flight.name)
                if is_short(row):
                    continue
                output = step_output(row)
                if output.num_results is not None and not flight.counted:
                    flight.left, flight.counted = output.num_results, True
                if output.finish_reason is not None:
                    flight.left -= 1
                    if not flight.left:
                        self._end(flight)
        if kept:
            self._outputs.put(kept)

    def _take_told(self, replica: Replica, told: Told) -> None:
        changes = [_shared(change) for change in told.changes]
        for begin in range(0, len(changes), _AT_ONCE):
            with self._lock:
                self.router.apply(replica.number, changes[begin : begin + _AT_ONCE])
        if told.load is not None:
            with self._lock:
                self.router.measured(replica.number, told.load.prefill_tokens_a_second)

    def _take_answer(self, sent: int, failed: bool, result: Any) -> None:
        replica, waits = self._calls.pop(sent, (None, None))
        if replica is None or waits is None:
            return
        if isinstance(waits, Gathering):
            waits.take(replica.name, failed, result)
            if isinstance(result, EngineStats):
                replica.stats = result
            self._check_gathered(waits)
        elif isinstance(waits, _Flight):
            self._take_verdict(waits, replica, failed, result)
        else:
            self._answer(waits, failed, result)

    def _take_verdict(self, flight: _Flight, replica: Replica, failed: bool, result: Any) -> None:
        """Takes whether a replica has accepted a request."""
        if flight.replica is not replica or self._flights.get(flight.name) is not flight:
            return
        if failed and isinstance(result, QueueFull):
            flight.full.add(replica.number)
            if flight.full < {each.number for each in self._replicas.values() if not each.draining}:
                self.router.end(flight.name)
                replica.flights.discard(flight.name)
                self._send(flight)
                return
        number, flight.number = flight.number, None
        if failed:
            self._end(flight)
            if number is None:  # the client believes that it runs: a replica before had taken it
                self._outputs.put(Lost(flight.name, str(result)))
                return
        self._answer(number, failed, result)

    # -- ends ------------------------------------------------------------------------------------

    def _end(self, flight: _Flight) -> None:
        self._flights.pop(flight.name, None)
        self.router.end(flight.name)
        replica = flight.replica
        if replica is not None:
            replica.flights.discard(flight.name)
            self._check_emptied(replica)

    def _check_emptied(self, replica: Replica) -> None:
        if replica.draining and not replica.flights:
            emptied = self._emptied.pop(replica.name, None)
            if emptied is not None:
                emptied()

    def _is_there(self, replica: Replica) -> bool:
        return self._replicas.get(replica.name) is replica

    def _gone(self, replica: Replica, reason: str) -> None:
        """Sends what a replica had not answered to others, and tells the client of the rest."""
        del self._replicas[replica.name], self._by_number[replica.number]
        self.router.leave(replica.number)
        replica.cut()
        text = f"replica {replica.name} ended: {reason}"
        if replica.draining and not replica.flights:
            log.info("%s", text)
        else:
            log.error("%s; requests that it had: %d", text, len(replica.flights))
        if replica.stats is not None:
            self._left = [merged_stats({}, [*self._left, replica.stats])]
        for sent, (whose, waits) in list(self._calls.items()):
            if whose is replica:
                del self._calls[sent]
                if isinstance(waits, Gathering):
                    waits.waits.discard(replica.name)
                    self._check_gathered(waits)
                elif isinstance(waits, int):
                    self._answer(waits, True, EngineStopped(text))
        for name in sorted(replica.flights):
            flight = self._flights.get(name)
            if flight is None:
                continue
            flight.replica, flight.full = None, set()
            if not flight.began and not flight.moved:
                flight.moved = True
                self._send(flight)
            else:
                self._lose(flight, text)
        replica.flights.clear()
        emptied = self._emptied.pop(replica.name, None)
        if emptied is not None:
            emptied()
        self._note_absence()
        self._wake()

    def _note_absence(self) -> None:
        there = any(not each.draining for each in self._replicas.values())
        if there:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = self._clock()

    def _lose(self, flight: _Flight, reason: str) -> None:
        """Fails a request, unless the client has it run again."""
        del self._flights[flight.name]
        self._parked.pop(flight.name, None)
        if flight.number is not None:
            number, flight.number = flight.number, None
            self._answer(number, True, EngineStopped(reason))
            return
        if not flight.moved:
            self._lost[flight.name] = flight
        self._outputs.put(Lost(flight.name, reason, may_run_again=not flight.moved))

    def _check_gathered(self, gathering: Gathering) -> None:
        if gathering.waits:
            return
        try:
            result = gathering.answer(self._left)
        except Exception as error:
            undoing = self._kept.undone(gathering)
            for name in gathering.results if undoing is not None else ():
                if name in self._replicas:
                    self._replicas[name].send(undoing)
            self._answer(gathering.number, True, error)
            return
        self._kept.note(gathering.method, gathering.args, gathering.kwargs)
        self._answer(gathering.number, False, result)

    def _check_deadlines(self) -> None:
        now = self._clock()
        with self._lock:
            late = [
                (sent, replica, waits)
                for sent, (replica, waits) in self._calls.items()
                if isinstance(waits, Gathering) and waits.deadline < now
            ]
            for sent, replica, gathering in late:
                del self._calls[sent]
                log.warning("replica %s has not answered %s", replica.name, gathering.method)
                gathering.waits.discard(replica.name)
                self._check_gathered(gathering)
            for flight in [f for f in self._parked.values() if now - f.since > PATIENCE]:
                self._lose(flight, f"no replica took requests for {PATIENCE:.0f} s")

    # -- small things ----------------------------------------------------------------------------

    def _answer(self, number: int | None, failed: bool, result: Any) -> None:
        if number is not None:
            self._answers.put((number, failed, result))

    def _check(self, replica: Replica) -> None:
        if self._closed.is_set():
            raise ConnectionAbortedError("the hub is closed")
        if replica.name in self._replicas:
            raise ValueError(f"name must be new, got {replica.name!r}, which is there already")
        if self._model is None:
            return
        alike = "model_digest", "weights_digest", "max_model_len", "recipe", "caching", "model_impl"
        for each in alike:
            ours, theirs = getattr(self._model, each), getattr(replica.ready, each)
            if ours != theirs:
                raise ValueError(
                    f"replica {replica.name} must be of the same model as the others: its "
                    f"{each} is {theirs}, theirs is {ours}"
                )

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")


class _Outputs:
    """The client's end of calls and outputs."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._items: list[Any] = []
        self._ended = False
        self._come = threading.Condition()

    def put(self, item: Any) -> None:
        """Gives the client an item; from any thread."""
        with self._come:
            self._items.append(item)
            self._come.notify()

    def end(self) -> None:
        """Nothing comes any more."""
        with self._come:
            self._ended = True
            self._come.notify()

    def send(self, item: Any) -> None:
        self._hub.take(item)

    def wait(self, timeout: float) -> bool:
        with self._come:
            return bool(self._come.wait_for(lambda: self._items or self._ended, timeout))

    def receive(self) -> list[Any]:
        with self._come:
            self._come.wait_for(lambda: self._items or self._ended)
            found, self._items = self._items, []
        if not found:
            raise EOFError("it was closed")
        return found

    def close(self) -> None:
        self._hub.kill()


class _Answers:
    """The client's end of answers."""

    def __init__(self, answers: SimpleQueue[Any]) -> None:
        self._answers = answers

    def send(self, item: Any) -> None:
        raise ValueError("item: nothing is sent to where answers come from")

    def wait(self, timeout: float) -> bool:
        return not self._answers.empty()

    def receive(self) -> list[Any]:
        item = self._answers.get()
        if item is None:
            raise EOFError("it was closed")
        return [item]

    def close(self) -> None:
        pass


def _namespace(more: dict[str, Any]) -> Hashable:
    """The namespace of a request, as far as it is known here."""
    lora = more.get("lora_request")
    name = None if lora is None else lora.lora_name
    return name, more.get("cache_salt"), more.get("tenant")


def _shared(change: Change) -> Change:
    """The change with the namespace as `_namespace` gives it: adapters by their names."""
    if isinstance(change, Opened):
        place = change.namespace
        adapter = getattr(place, "adapter", None)
        name = None if adapter is None else adapter.rpartition("@")[0]
        key = (name, getattr(place, "cache_salt", None), getattr(place, "tenant", None))
        return change._replace(namespace=key)
    return change


def _free_number(taken: dict[int, Any]) -> int:
    return next(number for number in count() if number not in taken)

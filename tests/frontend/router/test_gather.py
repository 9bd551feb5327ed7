"""What becomes of a call to all replicas if one of them is late, refuses it, ends or joins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coppice.frontend.errors import EngineStopped
from coppice.frontend.router import gather
from coppice.frontend.router.calls import Calls
from coppice.frontend.router.gather import (
    GATHER_SECONDS,
    PIN_SECONDS,
    STATS_SECONDS,
    Gatherings,
)
from coppice.runtime.report.snapshot import PinState
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.request import Unfinished
from tests.runtime.report.test_merged import full

IDS = [1, 2, 3]


class Answers(list[Any]):
    def answer(self, number: int | None, failed: bool, result: Any) -> None:
        self.append((number, failed, result))


class Asked:
    """Two replicas, which note what they are sent; `gatherings` asks them at the time `now`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.replicas: dict[str, Any] = {}
        self.calls, self.answers = Calls(), Answers()
        members: Any = SimpleNamespace(by_name=self.replicas)
        answers: Any = self.answers
        self.gatherings = Gatherings(members, self.calls, answers, lambda: self.now)
        for name in "ab":
            self.join(name)

    def join(self, name: str) -> None:
        """A replica joins."""
        sent: list[Any] = []
        replica: Any = SimpleNamespace(
            name=name, stats=None, late=False, sent=sent, send=sent.append
        )
        self.replicas[name] = replica
        self.gatherings.join(replica)

    def leave(self, name: str) -> None:
        """A replica ends, as the hub notes it."""
        replica = self.replicas.pop(name)
        self.calls.drop(lambda whose, _: whose is replica)
        self.gatherings.leave(replica)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Begins a call; what it waits for, `answer` answers."""
        self.gatherings.begin(1, method, args, kwargs)

    def answer(self, name: str, result: Any, *, failed: bool = False) -> None:
        """The replica answers the call that waits for it."""
        ((replica, gathering),) = self.calls.drop(lambda replica, _: replica.name == name)  # type: ignore[attr-defined]
        self.gatherings.take(gathering, replica, failed, result)  # type: ignore[arg-type]

    def done(self, method: str, *args: Any, result: Any = None, **kwargs: Any) -> None:
        """A call that all replicas answer alike."""
        self.ask(method, *args, **kwargs)
        for name in list(self.replicas):
            self.answer(name, result)

    def sent(self, name: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        """What a replica was sent since this was asked last."""
        found = [item[1:] for item in self.replicas[name].sent]
        self.replicas[name].sent.clear()
        return found

    def late(self, seconds: float) -> None:
        """Time passes, and the hub looks at the clock."""
        self.now += seconds
        self.gatherings.check_deadlines(self.now)


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def unmerged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of replicas stay apart."""
    monkeypatch.setattr(gather, "merged_stats", lambda results, left: dict(results))


def pin(name: str, seconds_left: float | None = None) -> PinState:
    return PinState(name, None, len(IDS), 0, seconds_left, seconds_left)


@pytest.mark.usefixtures("unmerged")
def test_counts_of_one_that_is_late_are_the_last_ones(asked: Asked) -> None:
    asked.replicas["b"].stats = "those of before"
    asked.ask("stats")
    asked.answer("a", "new ones")
    asked.late(STATS_SECONDS)
    assert not asked.answers
    asked.late(0.1)
    assert asked.answers == [(1, False, {"a": "new ones", "b": "those of before"})]


@pytest.mark.usefixtures("unmerged")
def test_counts_of_one_that_has_never_told_any_are_left_out(asked: Asked) -> None:
    asked.ask("stats")
    asked.answer("a", "new ones")
    asked.late(STATS_SECONDS + 0.1)
    assert asked.answers == [(1, False, {"a": "new ones"})]


def test_other_calls_have_more_time(asked: Asked) -> None:
    asked.ask("is_sleeping")
    asked.answer("a", True)
    asked.late(GATHER_SECONDS)
    assert not asked.answers
    asked.late(0.1)
    assert asked.answers == [(1, False, True)]


def test_nobody_answers(asked: Asked) -> None:
    asked.ask("is_sleeping")
    asked.late(GATHER_SECONDS + 0.1)
    ((number, failed, error),) = asked.answers
    assert (number, failed, type(error)) == (1, True, EngineStopped)


# -- counts of those that end ------------------------------------------------------------------


def test_one_that_ends_after_it_was_asked_counts_once(asked: Asked) -> None:
    asked.ask("stats")
    asked.answer("a", full())
    asked.leave("a")
    asked.answer("b", full(2))
    asked.done("stats", result=full(2))
    (_, _, during), (_, _, after) = asked.answers
    assert during == after
    assert during.requests == full().requests + full(2).requests
    assert [each.name for each in during.replicas] == ["b"]


def test_counts_that_can_not_be_added_end_nothing(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.done("stats", result=full())
    asked.ask("is_sleeping")
    asked.answer("b", True)

    def fails(*_: object) -> None:
        raise ValueError("they differ")

    with monkeypatch.context() as patch:
        patch.setattr(gather, "merged_stats", fails)
        asked.leave("a")
    assert asked.answers[1:] == [(1, False, True)], "who waited for it is answered"


# -- what replicas are to have in common -------------------------------------------------------


def test_a_pin_ends_where_it_is_kept_too(asked: Asked) -> None:
    asked.done("put_pin", "short", IDS, result=pin("short", 60.0), ttl=60.0)
    asked.done("put_pin", "long", IDS, result=pin("long"), cache_salt="salt")
    asked.now = 45.0
    asked.join("c")
    assert asked.sent("c") == [
        ("put_pin", ("short", IDS), {"ttl": 15.0}),
        ("put_pin", ("long", IDS), {"cache_salt": "salt"}),
    ]
    asked.now = 60.0
    asked.join("d")
    assert asked.sent("d") == [("put_pin", ("long", IDS), {"cache_salt": "salt"})]
    asked.late(0.0)
    for name in asked.replicas:
        asked.answer(name, (pin("long"),))
    assert list(asked.gatherings._kept.pins) == ["long"], "its tokens are freed"


def test_replicas_are_asked_whether_a_pin_was_used_before_it_is_forgotten(asked: Asked) -> None:
    asked.done("put_pin", "p", IDS, result=pin("p", 60.0), ttl=60.0)
    for name in "ab":
        asked.sent(name)
    asked.late(44.0)
    assert not asked.sent("a")
    asked.late(2.0)
    assert asked.sent("a") == [("list_pins", (), {})]
    asked.late(1.0)
    assert not asked.sent("a"), "it is asked already"
    asked.answer("a", (pin("p", 58.0),))
    asked.answer("b", (pin("p", 20.0),))
    assert asked.answers[-1] == (None, False, (pin("p", 58.0),))
    asked.now = 61.0
    asked.join("c")
    assert asked.sent("c") == [("put_pin", ("p", IDS), {"ttl": 44.0})]


def test_a_late_answer_to_a_pin_does_not_bring_it_back(asked: Asked) -> None:
    asked.ask("put_pin", "p", IDS)
    asked.replicas["b"].late = True
    asked.answer("a", pin("p"))
    asked.ask("unpin", "p")
    asked.answer("a", True)
    asked.late(GATHER_SECONDS)
    asked.join("c")
    assert not [call for call in asked.sent("c") if call[0] == "put_pin"]


def test_a_pin_that_is_gone_does_not_reach_one_that_joins_while_a_replica_is_late(
    asked: Asked,
) -> None:
    asked.ask("put_pin", "p", IDS)
    asked.answer("a", pin("p"))
    asked.replicas["b"].late = True
    asked.ask("unpin", "p")
    asked.answer("a", True)
    asked.join("c")
    assert not asked.sent("c")


@pytest.mark.parametrize("method", ["unpin", "reset_cache"])
def test_a_late_end_of_pins_spares_those_made_after_it(asked: Asked, method: str) -> None:
    asked.done("put_pin", "p", IDS, result=pin("p"))
    asked.ask(method, *(["p"] if method == "unpin" else []))
    asked.answer("a", True)
    asked.replicas["b"].late = True
    asked.ask("put_pin", "p", [7, 8])
    asked.answer("a", pin("p"))
    asked.late(GATHER_SECONDS + 0.1)
    assert [number for number, *_ in asked.answers] == [1, 1, 1]
    asked.join("c")
    assert asked.sent("c") == [("put_pin", ("p", [7, 8]), {})]


def test_a_pin_that_is_refused_after_its_end_is_undone(asked: Asked) -> None:
    asked.done("put_pin", "p", IDS, result=pin("p", 60.0), ttl=60.0)
    asked.now = 61.0
    asked.ask("put_pin", "p", IDS)
    asked.answer("a", pin("p"))
    asked.answer("b", ValueError("no room"), failed=True)
    assert asked.sent("a")[-1] == ("unpin", ("p",), {})
    asked.join("c")
    assert not asked.sent("c")


@pytest.mark.parametrize("method", ["list_pins", "cache_report"])
def test_a_pin_that_was_used_has_more_time(
    asked: Asked, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "merged_report", lambda results, left: next(iter(results.values())))
    asked.done("put_pin", "p", IDS, result=pin("p", 60.0), ttl=60.0)
    asked.now = 50.0
    told: Any = (pin("p", 40.0), pin("unknown"))
    asked.done(method, result=told if method == "list_pins" else SimpleNamespace(pins=told))
    asked.now = 70.0
    asked.join("c")
    assert asked.sent("c") == [("put_pin", ("p", IDS), {"ttl": 20.0})]


def test_pins_of_an_adapter_end_with_it(asked: Asked) -> None:
    judge, writer = LoRARequest("judge", 1, "/judge"), LoRARequest("writer", 2, "/writer")
    for adapter in (judge, writer):
        asked.done("load_lora", adapter)
        name = adapter.lora_name
        asked.done("put_pin", name, IDS, result=pin(name), lora_request=adapter)
    asked.done("unload_lora", "judge")
    asked.join("c")
    assert [call[:2] for call in asked.sent("c")] == [
        ("load_lora", (writer,)), ("put_pin", ("writer", IDS)),
    ]  # fmt: skip
    newer = LoRARequest("writer", 2, "/newer")
    asked.done("load_lora", newer, replace=True)
    asked.join("d")
    assert [call[:2] for call in asked.sent("d")] == [("load_lora", (newer,))]
    asked.done("list_pins", result=(pin("writer"),))  # its files were the same
    asked.join("e")
    assert asked.sent("e") == [
        ("load_lora", (newer,), {"replace": True}),
        ("put_pin", ("writer", IDS), {"lora_request": newer}),
    ]


def test_an_adapter_is_unloaded_though_one_replica_had_not_loaded_it(asked: Asked) -> None:
    judge = LoRARequest("judge", 1, "/judge")
    asked.done("list_loras", result=[judge])
    asked.done("put_pin", "p", IDS, result=pin("p"), lora_request=judge)
    asked.ask("unload_lora", "judge")
    asked.answer("a", None)
    asked.answer("b", ValueError("no adapter is named 'judge'"), failed=True)
    asked.join("c")
    assert not asked.sent("c")


def test_an_adapter_that_is_there_is_not_unloaded_where_another_replica_refuses_it(
    asked: Asked,
) -> None:
    """A new ingress loads anew what it finds; the files may be gone on one machine."""
    judge = LoRARequest("judge", 1, "/judge")
    asked.done("list_loras", result=[judge])
    for name in "ab":
        asked.sent(name)
    asked.ask("load_lora", judge, replace=True)
    asked.answer("a", ValueError("no such folder"), failed=True)
    asked.answer("b", None)
    assert [call[0] for call in asked.sent("b")] == ["load_lora", "load_lora"]


def test_one_that_joins_meanwhile_is_asked_too(asked: Asked) -> None:
    asked.ask("put_pin", "p", IDS)
    asked.join("c")
    assert asked.sent("c") == [("put_pin", ("p", IDS), {})]
    for name in "abc":
        assert not asked.answers
        asked.answer(name, pin("p"))
    assert asked.answers == [(1, False, pin("p"))]
    asked.ask("list_pins")
    asked.join("d")
    asked.answer("a", ())
    assert asked.sent("d") == [("put_pin", ("p", IDS), {})], "a question is not its concern"


def test_one_that_joins_meanwhile_undoes_it_too(asked: Asked) -> None:
    asked.ask("put_pin", "p", IDS)
    asked.join("c")
    asked.answer("c", pin("p"))
    asked.answer("b", pin("p"))
    asked.answer("a", ValueError("no room"), failed=True)
    unpin = ("unpin", ("p",), {})
    assert [asked.sent(name)[1:] for name in "abc"] == [[], [unpin], [unpin]]


def test_pins_are_there_again_after_a_reset_that_another_refuses(asked: Asked) -> None:
    asked.done("put_pin", "p", IDS, result=pin("p", 60.0), ttl=60.0)
    asked.now = 20.0
    asked.ask("reset_cache")
    asked.answer("a", None)
    asked.answer("b", Unfinished("a request runs"), failed=True)
    assert isinstance(asked.answers[-1][2], Unfinished)
    assert asked.sent("a")[2:] == [("put_pin", ("p", IDS), {"ttl": 40.0})]
    assert not asked.sent("b")[2:]


# -- pins without one that hangs ---------------------------------------------------------------


def test_pins_do_without_one_that_is_late(asked: Asked) -> None:
    asked.ask("put_pin", "p", IDS)
    asked.answer("a", pin("p"))
    asked.late(PIN_SECONDS)
    assert not asked.answers
    asked.late(0.1)
    assert asked.answers == [(1, False, pin("p"))]
    asked.ask("unpin", "p")
    asked.answer("a", True)
    assert asked.answers[1:] == [(1, False, True)], "it is not waited for again"
    assert asked.sent("b")[1:] == [("unpin", ("p",), {})], "it does it when it can"
    asked.replicas["b"].late = False  # it has answered something
    asked.ask("unpin", "p")
    asked.answer("a", False)
    assert len(asked.answers) == 2


def test_pins_wait_for_one_at_least(asked: Asked) -> None:
    asked.ask("put_pin", "p", IDS)
    asked.late(GATHER_SECONDS)
    assert not asked.answers
    asked.answer("b", pin("p"))
    asked.late(0.1)
    assert asked.answers == [(1, False, pin("p"))]
    for each in asked.replicas.values():
        each.late = True
    asked.ask("unpin", "p")
    asked.late(PIN_SECONDS + 0.1)
    assert len(asked.answers) == 1
    asked.late(GATHER_SECONDS)
    assert isinstance(asked.answers[1][2], EngineStopped)

"""What becomes of a call to all replicas if one of them is late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coppice.frontend.errors import EngineStopped
from coppice.frontend.router import gather
from coppice.frontend.router.calls import Calls
from coppice.frontend.router.gather import GATHER_SECONDS, STATS_SECONDS, Gatherings


class Answers(list[Any]):
    def answer(self, number: int | None, failed: bool, result: Any) -> None:
        self.append((number, failed, result))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two replicas; `gatherings` asks them at time 0, and `answer` has one of them answer."""
    monkeypatch.setattr(gather, "merged_stats", lambda results, left: dict(results))
    replicas = {
        name: SimpleNamespace(name=name, stats=None, send=lambda item: None) for name in "ab"
    }
    calls, answers = Calls(), Answers()
    members: Any = SimpleNamespace(by_name=replicas)
    gatherings = Gatherings(members, calls, answers, lambda: 0.0)  # type: ignore[arg-type]

    def answer(name: str, result: Any) -> None:
        (call,) = calls.drop(lambda replica, _: replica.name == name)
        gatherings.take(call[1], call[0], False, result)  # type: ignore[arg-type]

    return SimpleNamespace(gatherings=gatherings, answer=answer, answers=answers, replicas=replicas)


def test_counts_of_one_that_is_late_are_the_last_ones(asked: Any) -> None:
    asked.replicas["b"].stats = "those of before"
    asked.gatherings.begin(1, "stats", (), {})
    asked.answer("a", "new ones")
    asked.gatherings.check_deadlines(STATS_SECONDS)
    assert not asked.answers
    asked.gatherings.check_deadlines(STATS_SECONDS + 0.1)
    assert asked.answers == [(1, False, {"a": "new ones", "b": "those of before"})]


def test_counts_of_one_that_has_never_told_any_are_left_out(asked: Any) -> None:
    asked.gatherings.begin(1, "stats", (), {})
    asked.answer("a", "new ones")
    asked.gatherings.check_deadlines(STATS_SECONDS + 0.1)
    assert asked.answers == [(1, False, {"a": "new ones"})]


def test_other_calls_have_more_time(asked: Any) -> None:
    asked.gatherings.begin(1, "is_sleeping", (), {})
    asked.answer("a", True)
    asked.gatherings.check_deadlines(GATHER_SECONDS)
    assert not asked.answers
    asked.gatherings.check_deadlines(GATHER_SECONDS + 0.1)
    assert asked.answers == [(1, False, True)]


def test_nobody_answers(asked: Any) -> None:
    asked.gatherings.begin(1, "is_sleeping", (), {})
    asked.gatherings.check_deadlines(GATHER_SECONDS + 0.1)
    ((number, failed, error),) = asked.answers
    assert (number, failed, type(error)) == (1, True, EngineStopped)

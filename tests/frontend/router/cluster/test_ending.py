"""A command ends its application, whatever has become of the ingress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from coppice.frontend.router.cluster.start import _ended

serve = pytest.importorskip("ray.serve")


class Handle:
    """That of an ingress, whose methods answer, or raise what they are given."""

    def __init__(self, running: object = 3, drain: object = None) -> None:
        self.drained: float | None = None
        self.running = self._method(lambda _: running)
        self.drain = self._method(lambda seconds: self._drain(seconds, drain))

    def _drain(self, seconds: float, answer: object) -> object:
        self.drained = seconds
        return answer

    def _method(self, answer: Callable[[float], object]) -> Any:
        def result(timeout_s: float) -> object:
            found = answer(timeout_s)
            if isinstance(found, Exception):
                raise found
            return found

        return SimpleNamespace(remote=lambda: SimpleNamespace(result=result))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was closed and deleted."""
    done: list[str] = []
    monkeypatch.setattr(serve, "delete", done.append)
    return done


def end(handle: Handle, done: list[str], grace: float | None = 2.0) -> bool:
    holder: Any = SimpleNamespace(close=lambda: done.append("closed"))
    return _ended(handle, holder, grace, threading.Event())


@pytest.mark.parametrize(
    ("handle", "said"),
    [
        (Handle(), "stopping; requests still running: 3\n"),
        (Handle(RuntimeError("died")), "the ingress does not answer: RuntimeError\n"),
        (
            Handle(drain=TimeoutError()),
            "stopping; requests still running: 3\nthe ingress does not answer: TimeoutError\n",
        ),
    ],
)
def test_it_is_deleted(
    handle: Handle, said: str, done: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(handle, done)
    assert done == ["closed", "coppice"]
    assert capsys.readouterr().out == said


def test_without_a_signal_to_be_gentle_it_does_not_drain(done: list[str]) -> None:
    handle = Handle()
    assert end(handle, done, grace=None)
    assert handle.drained is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_not_deleted_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("no controller")

    monkeypatch.setattr(serve, "delete", fail)
    assert not end(Handle(), [])


def test_a_second_signal_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, hurry = threading.Event(), threading.Event()

    def delete(_: str) -> None:
        hurry.set()
        assert go_on.wait(10)

    monkeypatch.setattr(serve, "delete", delete)
    holder: Any = SimpleNamespace(close=lambda: None)
    assert not _ended(Handle(), holder, None, hurry)
    go_on.set()

"""Loading is shown once it takes more than two seconds: in the log, or as a bar on a terminal."""

from __future__ import annotations

import logging

import pytest

from coppice.runtime.model.files.progress import LoadingProgress


def loaded(seconds: list[float], *, terminal: bool = False) -> None:
    """Ten parts of 1 MiB, read at these times; then the end."""
    times = iter([0.0, *seconds, *[seconds[-1]] * 20])
    with LoadingProgress(10 << 20, clock=lambda: next(times), terminal=terminal) as progress:
        for _ in range(10):
            progress.add(1 << 20)


def test_what_is_quick_is_not_shown(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        loaded([0.1 * i for i in range(10)])
        loaded([0.1 * i for i in range(10)], terminal=True)
    assert not caplog.records
    assert not capsys.readouterr().err


def test_what_takes_longer_is_logged_in_percent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        loaded([1.0, 3.0, 3.0, 4.0, 4.0, 9.0, 9.0, 10.0, 11.0, 12.0])
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("loading weights: 20 % of 10.0 MiB")
    assert lines[-1].startswith("loading weights: 100 % of 10.0 MiB")
    assert len(lines) == 3, "one every five seconds, and one at the end"


def test_on_a_terminal_a_bar_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    loaded([3.0], terminal=True)
    assert "loading weights" in capsys.readouterr().err

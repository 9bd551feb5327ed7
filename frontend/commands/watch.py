"""`coppice report`: the report of a running server or a saved one, once or live like `top`."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from coppice.frontend.commands.keys import Wait, pressed
from coppice.frontend.report.encode import SCHEMA, VERSION, report_schema
from coppice.frontend.report.terminal import render_live
from coppice.frontend.report.words import Report

_PATH = "/cache/report"
_TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 64 << 20


class ReportUnavailable(RuntimeError):
    """The server does not answer, or answers with an error."""


class Window:
    """The part of the report that fits the terminal; keys scroll it.

    Attributes:
        report: what is shown.
        trouble: why the report is not the newest one; empty if it is.
    """

    def __init__(self, report: Report, *, with_keys: bool) -> None:
        """`with_keys`: whether keys can be read, and the last line explains them."""
        self.report = report
        self.trouble = ""
        self._with_keys = with_keys
        self._first = 0  # line at the top
        self._page, self._most = 1, 0  # lines that fit; the largest `_first`

    def press(self, key: str) -> None:
        """Scrolls as a pager does; other keys are ignored."""
        steps = {"up": -1, "down": 1, "page up": -self._page, "page down": self._page}
        steps |= {"home": -self._most, "end": self._most}
        self._first = min(max(0, self._first + steps.get(key, 0)), self._most)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        whole = render_live(self.report, trouble=self.trouble, width=width)
        lines = console.render_lines(whole, options.update(height=None), pad=False)
        self._page = max(1, console.height - 1)
        self._most = max(0, len(lines) - self._page)
        self._first = min(self._first, self._most)
        for line in lines[self._first : self._first + self._page]:
            yield from line
            yield Segment.line()
        below = len(lines) - self._first - self._page
        hints = ["q ends"] if self._with_keys else []
        if self._most and self._with_keys:
            hints.insert(0, "arrows, space and b move")
        if below > 0:
            hints.insert(0, f"{below} more line{'s' * (below > 1)} below")
        yield Text(" · ".join(hints), "dim", overflow="ellipsis", no_wrap=True, end="")


def run(
    console: Console,
    source: str,
    *,
    interval: float,
    once: bool,
    api_key: str | None,
    wait: Wait | None = None,
) -> None:
    """Prints the report of a file or a server, or shows a server's live until the user quits.

    Args:
        console: if it is no terminal, the report is printed once.
        source: URL of a server, or path of a saved report.
        interval: seconds between two requests to the server.
        once: print the report of a server once.
        api_key: sent to the server, if given.
        wait: waits for keys; default: those of the terminal.

    Raises:
        ValueError: the source is neither a URL nor a file with a report, or an option is wrong.
        ReportUnavailable: the server did not answer the first time.
    """
    if not interval > 0:
        raise ValueError(f"interval must be more than 0 seconds, got {interval}")
    if not source.startswith(("http://", "https://")):
        console.print(render_live(read_file(Path(source)), width=console.width))
        return
    url = report_url(source)
    report = fetch(url, api_key)
    if once or not console.is_terminal:
        console.print(render_live(report, width=console.width))
        return
    with pressed() as keys:
        _live(console, report, lambda: fetch(url, api_key), interval, wait or keys)


def _live(
    console: Console,
    report: dict[str, Any],
    fetch_again: Callable[[], dict[str, Any]],
    interval: float,
    keys: Wait | None,
) -> None:
    """Shows the report, fetched again every `interval` seconds, until the user quits."""
    window = Window(report, with_keys=keys is not None)
    wait = keys or _sleep
    with Live(window, console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        due = time.monotonic() + interval
        while True:
            found = wait(max(0.0, due - time.monotonic()))
            if "quit" in found:
                return
            for key in found:
                window.press(key)
            if not found:
                window.trouble = ""
                try:
                    window.report = fetch_again()
                except ReportUnavailable as error:
                    window.trouble = f"{error}; shown is the last answer"
                due = time.monotonic() + interval
            live.refresh()


def _sleep(seconds: float) -> list[str]:
    time.sleep(seconds)
    return []


def report_url(source: str) -> str:
    """The URL of a server's report, from that URL or from the server's.

    Raises ValueError if `source` names no host.
    """
    parts = urlsplit(source)
    if not parts.netloc:
        raise ValueError(f"source must be a file or the URL of a server, got {source!r}")
    path = parts.path.rstrip("/").removesuffix(_PATH).removesuffix("/cache")
    return urlunsplit((parts.scheme, parts.netloc, path + _PATH, "", ""))


def fetch(url: str, api_key: str | None) -> dict[str, Any]:
    """The report at `url`.

    Raises:
        ReportUnavailable: the server does not answer, or answers with an error.
        ValueError: the answer is not a report that this version can read.
    """
    headers = {"Accept": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            body = answer.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            raise ReportUnavailable(f"{url} answered {error.code}{_why(error)}") from error
    except (OSError, ValueError) as error:
        raise ReportUnavailable(f"{url} does not answer: {error}") from error
    return checked(body, url)


def _why(error: urllib.error.HTTPError) -> str:
    try:
        return f": {json.loads(error.read(1 << 16))['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return ""


def read_file(path: Path) -> dict[str, Any]:
    """A saved report. Raises ValueError if the file can't be read or is not a report."""
    try:
        return checked(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"source: {path} cannot be read: {error.strerror}") from error


def checked(body: bytes, where: str) -> dict[str, Any]:
    """The report in `body`, which came from `where`.

    Raises ValueError if it is not a report, is incomplete, or has another version.
    """
    try:
        report = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"source: {where} is not JSON: {error}") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise ValueError(f"source: {where} is no report of a server's cache ({SCHEMA})")
    if report.get("version") != VERSION:
        raise ValueError(
            f"source: {where} has version {report.get('version')!r}, this command knows {VERSION}"
        )
    missing = [name for name in report_schema()["required"] if name not in report]
    if missing:
        raise ValueError(f"source: {where} lacks {', '.join(missing)}")
    return report

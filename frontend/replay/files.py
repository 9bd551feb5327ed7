"""The files into which the commands `replay` and `simulate` write their reports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text


def check_files(trace: Path | None, json_file: Path | None, html_file: Path | None) -> None:
    """Raises ValueError if a report can't be written, or would be written over another file."""
    for name, file in (("json", json_file), ("html", html_file)):
        if file is not None:
            _check_writable(name, file, trace)
    if json_file is not None and html_file is not None and _same(json_file, html_file):
        raise ValueError(f"html must not be the file of json, got {str(html_file)!r}")


def write_report(
    console: Console,
    report: Mapping[str, Any],
    json_file: Path | None,
    html_file: Path | None = None,
    render_page: Callable[[Mapping[str, Any]], str] | None = None,
) -> None:
    """Writes the files that are wanted and prints their names. Raises ValueError if that fails.

    `render_page` makes the HTML of a report.
    """
    if json_file is not None:
        _write(json_file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        console.print(Text(f"JSON: {json_file}"), soft_wrap=True)
    if html_file is not None and render_page is not None:
        _write(html_file, render_page(report))
        console.print(Text(f"page: {html_file}"), soft_wrap=True)


def _check_writable(name: str, file: Path, trace: Path | None) -> None:
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"{name} must be a file in a directory that exists, got {str(file)!r}")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ValueError(f"{name} must be a file that may be written, got {str(file)!r}")
    if trace is not None and _same(file, trace):
        raise ValueError(f"{name} must not be the trace itself, got {str(file)!r}")


def _same(one: Path, other: Path) -> bool:
    """Whether both paths name one file, which need not exist."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be written: {error.strerror}") from error

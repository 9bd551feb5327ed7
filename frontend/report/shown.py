"""A `CacheReport` that renders itself with `print`, in a rich console, and in a notebook."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, fields
from typing import Any

from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

from coppice.frontend.report.encode import Names, encode
from coppice.frontend.report.terminal import render_totals
from coppice.frontend.report.words import Decode
from coppice.runtime.report.snapshot import CacheReport

_WIDTH = 80

# Text without a colour keeps that of the notebook. Each colour has a contrast of at least 3 on
# white and on black, so it can be read in a light and in a dark notebook.
_THEME = TerminalTheme(
    background=(128, 128, 128),
    foreground=(128, 128, 128),
    normal=[
        (128, 128, 128), (214, 64, 56), (38, 145, 84), (176, 120, 16),
        (52, 120, 214), (176, 84, 190), (16, 138, 156), (128, 128, 128),
    ],
    bright=[
        (122, 128, 134), (128, 128, 128), (128, 128, 128), (128, 128, 128),
        (98, 114, 226), (128, 128, 128), (128, 128, 128), (128, 128, 128),
    ],
)  # fmt: skip
_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'
    "'DejaVu Sans Mono',Consolas,monospace\">{code}</pre>"
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShownReport(CacheReport):
    """A report with `decode`, which makes text of its token ids; pickling drops `decode`."""

    decode: Decode = field(compare=False)

    def __rich__(self) -> RenderableType:
        return render_totals(encode(self, Names(self.decode)))

    def __str__(self) -> str:
        """The table of `coppice generate --report`: 80 columns, without colours."""
        out = io.StringIO()
        Console(file=out, width=_WIDTH, color_system=None, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        """The same table with colours, for notebooks of light and of dark background."""
        console = Console(file=io.StringIO(), width=_WIDTH, record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(theme=_THEME, code_format=_HTML, inline_styles=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (_values(self),)


def shown(report: CacheReport, decode: Decode) -> ShownReport:
    """The same report, which renders its token ids as text by `decode`."""
    return ShownReport(**_values(report), decode=decode)


def _values(report: CacheReport) -> dict[str, Any]:
    return {each.name: getattr(report, each.name) for each in fields(CacheReport)}


def _plain(values: dict[str, Any]) -> CacheReport:
    return CacheReport(**values)

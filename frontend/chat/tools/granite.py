"""Tool calls as Granite 3 writes them: after a mark, a list of objects."""

from __future__ import annotations

import json
from collections.abc import Sequence

from coppice.frontend.chat.marks import Marks
from coppice.frontend.chat.tools.choice import Tool, Tools
from coppice.frontend.chat.tools.format import ToolFormat, object_of
from coppice.frontend.chat.tools.mistral import MistralReader

OPEN = "<|tool_call|>"


class GraniteFormat(ToolFormat):
    """`<|tool_call|>[{"name": ..., "arguments": ...}, ...]`; Granite 4 writes calls as Hermes."""

    marks = (OPEN,)

    def reader(self, tools: Tools) -> GraniteReader:
        return GraniteReader(parallel=tools.parallel)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        objects = [
            f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls
        ]
        return f"{OPEN}[{', '.join(objects)}]"

    def call(self, tool: Tool, marks: Marks) -> str:
        return object_of(tool)

    def after(self, call: str, parallel: bool, marks: Marks) -> str:
        more = f' (", " {call})*' if parallel else ""
        return f'after: "[" {call}{more} "]"'


class GraniteReader(MistralReader):
    """Reads such lists, after Granite 3.0's mark and after the tag that later ones may write."""

    openings = (OPEN, "<tool_call>")

"""How models write calls of tools: as grammars, for those that must call one, and as readers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod

from coppice.frontend.openai.tools.choice import Tool, Tools
from coppice.frontend.openai.tools.readers import HermesReader, LlamaReader, ToolReader
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

# White space as models are trained on it: what json.dumps writes.
_AS_TRAINED = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class ToolFormat(ABC):
    """One family's way of writing calls.

    Attributes:
        marks: what must stay in the text for calls to be found, even where it is a special token.
        arguments_key: name of the arguments in a call's object.
    """

    marks: tuple[str, ...] = ()
    arguments_key = "arguments"

    @abstractmethod
    def reader(self, tools: Tools) -> ToolReader:
        """A new reader, for one continuation of a request."""

    @abstractmethod
    def forced(self, calls: str, parallel: bool) -> str:
        """Lark rules of a text that is a call, or several; `calls` is any one call's object."""

    @abstractmethod
    def optional(self, calls: str, parallel: bool) -> str:
        """Lark rules of a text that may be, or have in it, calls."""

    def constraint(self, tools: Tools) -> StructuredOutputsParams | None:
        """What holds the text to the tools' schemas; None: nothing needs to."""
        if not tools.held:
            return None
        wanted = tools.forced or tools.allowed
        calls = " | ".join(f"call_{index}" for index in range(len(wanted)))
        write = self.forced if tools.forced else self.optional
        rules = [write(f"({calls})", tools.parallel)]
        rules += [f"call_{index}: {self._call(tool)}" for index, tool in enumerate(wanted)]
        return StructuredOutputsParams(grammar="\n".join(rules) + "\n")

    def _call(self, tool: Tool) -> str:
        name = json.dumps(tool.function.name)
        head = json.dumps(f'{{"name": {name}, "{self.arguments_key}": ')
        schema = json.loads(tool.schema_text) | {"x-guidance": _AS_TRAINED}
        return f'{head} %json {json.dumps(schema)} "}}"'


class HermesFormat(ToolFormat):
    """`<tool_call>` and an object between tags, as many as the model likes, text around them.

    Hermes 2 Pro and its successors, Qwen 2.5 and 3.
    """

    marks = ("<tool_call>", "</tool_call>")

    def reader(self, tools: Tools) -> ToolReader:
        return HermesReader(parallel=tools.parallel)

    def forced(self, calls: str, parallel: bool) -> str:
        more = r' ("\n" tagged)*' if parallel else ""
        return f"start: tagged{more}\n{self._tagged(calls)}"

    def optional(self, calls: str, parallel: bool) -> str:
        more = r' ("\n" tagged)*' if parallel else ""
        return (
            f'start: TEXT | before "\\n" {calls} "\\n</tool_call>"{more}\n'
            "before[lazy]: /(.|\\n)*<tool_call>/\n"
            "TEXT: /(.|\\n)*/ & ~/(.|\\n)*<tool_call>(.|\\n)*/\n"
            f"{self._tagged(calls)}"
        )

    @staticmethod
    def _tagged(calls: str) -> str:
        return f'tagged: "<tool_call>\\n" {calls} "\\n</tool_call>"'


class LlamaFormat(ToolFormat):
    """An object with `name` and `parameters`, and nothing else; several stand behind each other.

    Llama 3.1 and later.
    """

    arguments_key = "parameters"

    def reader(self, tools: Tools) -> ToolReader:
        return LlamaReader(parallel=tools.parallel)

    def forced(self, calls: str, parallel: bool) -> str:
        return f'start: {calls} ("; " {calls})*' if parallel else f"start: {calls}"

    def optional(self, calls: str, parallel: bool) -> str:
        written = self.forced(calls, parallel).replace("start:", "calls:")
        return f"start: TEXT | calls\nTEXT: /([^{{\\s](.|\\n)*)?/\n{written}"


FORMATS: dict[str, ToolFormat] = {"hermes": HermesFormat(), "llama": LlamaFormat()}


def format_of(tokenizer: Tokenizer, chosen: str = "auto") -> ToolFormat | None:
    """The format of that name; "auto" finds it in the chat template, None if there is none."""
    if chosen != "auto":
        return FORMATS[chosen]
    template = str(tokenizer.chat_template or "")
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "<|python_tag|>" in template or '"parameters"' in template:
        return FORMATS["llama"]
    return None

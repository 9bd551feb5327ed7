"""How one model writes its answers: reasoning, calls and text; and the readers and grammars of it.

down   a `Reading` of a request: where its text begins, which tools it has
       -> the constraint that the text must follow
up     the text of each continuation -> `Reading.reader()` -> pieces
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coppice.frontend.chat.marks import Marks
from coppice.frontend.chat.pieces import GatheredSpace, Reader, TextReader
from coppice.frontend.chat.reasoning.channels import ChannelReasoning
from coppice.frontend.chat.reasoning.format import ReasoningFormat, Start
from coppice.frontend.chat.reasoning.registry import reasoning_of
from coppice.frontend.chat.request_template import REQUEST_TEMPLATES
from coppice.frontend.chat.template import Messages, write_chat
from coppice.frontend.chat.tools.choice import Tools
from coppice.frontend.chat.tools.format import ToolFormat
from coppice.frontend.chat.tools.gpt_oss import GptOssFormat
from coppice.frontend.chat.tools.registry import format_of
from coppice.frontend.text.outputs import RequestOutput
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.structured_outputs import StructuredOutputsParams

_EFFORTS_OF_GPT_OSS = ("low", "medium", "high")
_END_OF_PROMPT = 16  # tokens that show whether the prompt begins or ends reasoning


@dataclass(frozen=True)
class Dialect:
    """How one model writes.

    Attributes:
        tokenizer: of the model, with its chat template.
        calls: how it writes tool calls; None: unknown.
        reasoning: how it marks reasoning; None: it does not reason, or its text is left as it is.
        marks: how its tokenizer spells marks.
        trust_templates: whether requests may bring chat templates of their own.
    """

    tokenizer: Tokenizer
    calls: ToolFormat | None
    reasoning: ReasoningFormat | None
    marks: Marks
    trust_templates: bool = False

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        *,
        trust_templates: bool = False,
    ) -> Dialect:
        """The dialect of a model, by names of formats, or by what its chat template shows.

        Raises ValueError if the two formats can't be of one model.
        """
        calls = format_of(tokenizer, tool_call_parser)
        reasoning = reasoning_of(tokenizer, reasoning_parser)
        if isinstance(reasoning, ChannelReasoning) and not isinstance(calls, GptOssFormat):
            if tool_call_parser != "auto":
                raise ValueError(
                    "tool_call_parser must be auto or gpt_oss with reasoning_parser gpt_oss, "
                    f"got {tool_call_parser!r}"
                )
            calls = GptOssFormat()
        return cls(tokenizer, calls, reasoning, Marks.of(tokenizer), trust_templates)

    def encode(self, messages: Messages, **more: Any) -> list[int]:
        """Token ids of a conversation; arguments are those of `write`. Raises as it does."""
        return self.tokenizer.encode_more(self.write(messages, **more))

    def write(
        self,
        messages: Messages,
        *,
        reasoning_effort: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        longest: int | None = None,
        **more: Any,
    ) -> str:
        """The text of a conversation; `more` are arguments of `write_chat`, which raises.

        `reasoning_effort` becomes what the chat template calls it; `template_arguments` win.

        Raises ValueError for an effort that the model can't be asked for, or for a chat template
        where none are trusted.
        """
        if chat_template is not None and not self.trust_templates:
            raise ValueError(
                "chat_template is taken from requests only with --trust-request-chat-template"
            )
        given = self._effort(reasoning_effort, chat_template) | dict(template_arguments or {})
        text = write_chat(
            self.tokenizer,
            messages,
            template_arguments=given,
            chat_template=chat_template,
            format=self.calls,
            apart=None if chat_template is None else REQUEST_TEMPLATES,
            longest=longest,
            **more,
        )
        if longest is not None:  # there may be many messages, or a template that writes much
            self.tokenizer.check_length("messages", text, longest)
        return text

    def _effort(self, effort: str | None, template: str | None) -> dict[str, Any]:
        if effort is None:
            return {}
        written = str(template or self.tokenizer.chat_template or "")
        if isinstance(self.reasoning, ChannelReasoning) and effort not in _EFFORTS_OF_GPT_OSS:
            raise ValueError(
                f"reasoning_effort must be one of {', '.join(_EFFORTS_OF_GPT_OSS)} for this model, "
                f"got {effort!r}"
            )
        names = [name for name in ("enable_thinking", "thinking") if _has_switch(written, name)]
        found: dict[str, Any] = dict.fromkeys(names, effort != "none")
        if re.search(r"\breasoning_effort\b", written):
            found["reasoning_effort"] = effort
        if not found and (effort == "none") == (self.reasoning is not None):
            what = "always reasons" if self.reasoning is not None else "does not reason"
            raise ValueError(f"reasoning_effort: this model {what}, got {effort!r}")
        return found

    def reading(
        self, prompt: Sequence[int], tools: Tools | None, continued: str | None = None
    ) -> Reading | None:
        """How the text after a prompt is read; None: as it is.

        Args:
            prompt: its token ids.
            tools: of the request, which needs `calls`.
            continued: the content of the message that the text continues, if it continues one.
        """
        if self.reasoning is None:
            return None if tools is None else Reading(self, tools, Start.ENDED)
        last = self.tokenizer.decode(prompt[-_END_OF_PROMPT:], skip_special_tokens=False)
        return Reading(self, tools, self.reasoning.start(last, continued))


@dataclass(frozen=True)
class Reading:
    """How the text of one request is read.

    Attributes:
        dialect: of the model.
        tools: that the request has.
        start: where its text begins.
    """

    dialect: Dialect
    tools: Tools | None
    start: Start

    def reader(self) -> Reader:
        """A new reader, for one continuation."""
        calls, reasoning = self.dialect.calls, self.dialect.reasoning
        answer: Reader = TextReader()
        if self.tools is not None and calls is not None:
            answer = calls.reader(self.tools)
        return GatheredSpace(answer if reasoning is None else reasoning.reader(answer, self.start))

    @property
    def needs_marks(self) -> bool:
        """Whether the text must keep special tokens, since some of them are marks."""
        calls, reasoning = self.dialect.calls, self.dialect.reasoning
        wanted = () if reasoning is None else reasoning.marks
        if self.tools is not None and calls is not None:
            wanted += calls.marks
        return self.dialect.marks.any_hidden(wanted)

    def constraint(self, form: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """The form that the whole text must have; None: any.

        What is asked of the answer, or of its calls, begins after the reasoning.
        """
        calls, reasoning, marks = self.dialect.calls, self.dialect.reasoning, self.dialect.marks
        prefix = None if reasoning is None else reasoning.prefix(self.start, marks)
        if self.tools is not None and calls is not None:
            held = calls.constraint(self.tools, marks)
            if held is not None:
                if isinstance(calls, GptOssFormat):  # its rules have the reasoning
                    return held
                form = held
        return form if form is None or prefix is None else replace(form, prefix=prefix)

    def reasoning_tokens(self, outputs: Iterable[RequestOutput]) -> int | None:
        """The tokens of all reasoning; None: there is none to count, or not exactly."""
        reasoning, tokenizer = self.dialect.reasoning, self.dialect.tokenizer
        if reasoning is None:
            return None
        total = 0

        def decode(some: list[int]) -> str:
            return tokenizer.decode(some, skip_special_tokens=True)

        for made in (each for output in outputs for each in output.outputs):
            silent = made.finish_reason == "stop" and not isinstance(made.stop_reason, str)
            ids = made.token_ids[: len(made.token_ids) - silent]  # without the end of the text
            count = reasoning.count(ids, self.start, self.dialect.marks, decode)
            if count is None:
                return None
            total += count
        return total


def _has_switch(template: str, name: str) -> bool:
    """Whether the template asks for a variable of that name."""
    return bool(re.search(rf"\{{%-?\s*(el)?if\b[^%]*(?<![.\w'\"]){name}\b(?!['\"\w])", template))

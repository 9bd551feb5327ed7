"""The conversation of `coppice chat`, with a server or with a model in this process."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.text import Text

from coppice.frontend.commands.markdown import StreamedMarkdown
from coppice.frontend.text.model.options import TextOptions
from coppice.runtime.config import EngineConfig
from coppice.runtime.requests.lora_request import LoRARequest

HELP = "/system TEXT sets the system prompt and starts again, /new starts again, /quit ends"
TIMEOUT_SECONDS = 600.0


@dataclass(slots=True)
class Usage:
    """Token counts of the last answer."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


class ChatFailed(RuntimeError):
    """No answer came, or it broke off; the message is the reason."""


class Partner(Protocol):
    """A server or a model, which answers the user.

    Attributes:
        name: of the model and, if it has one, its server.
        usage: of the last answer.
    """

    name: str
    usage: Usage

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The answer to the last message, in pieces; closing the iterator early aborts the rest.

        Sets `usage` at the end of the answer. Raises ChatFailed.
        """
        ...


class LocalPartner:
    """A model in this process."""

    def __init__(
        self,
        config: EngineConfig,
        text: TextOptions,
        sampling: Mapping[str, Any],
        lora_request: LoRARequest | None = None,
    ) -> None:
        """`sampling` are fields of `SamplingParams`; the others have the model's defaults.

        Raises ValueError if the model or the adapter can't be loaded.
        """
        from coppice.frontend.chat.template import encode_chat
        from coppice.frontend.text.engine import TextEngine

        self.name, self.usage = config.model, Usage()
        self._engine = TextEngine.load(config, text)
        self._encode = encode_chat
        self._engine.tokenizer.load_wrapped_soon()  # for the chat template, while the user types
        self._params = self._engine.defaults.params(sampling)
        self._turns, self._lora_request = 0, lora_request
        if lora_request is not None:
            self.name += f" with {lora_request.lora_name}"
            self._engine.engine.adapters.load(lora_request)

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        self._turns += 1
        name = f"turn-{self._turns}"
        try:
            ids = self._encode(self._engine.tokenizer, messages)
            self._engine.add(name, None, ids, self._params, lora_request=self._lora_request)
        except ValueError as error:
            raise ChatFailed(str(error)) from error
        try:
            while self._engine.has_unfinished():
                for delta in self._engine.step():
                    yield delta.text
                    if delta.output is not None:
                        (made,) = delta.output.outputs
                        cached = delta.output.cached_tokens
                        self.usage = Usage(len(ids), cached, len(made.token_ids))
                        if made.finish_reason == "error":
                            raise ChatFailed(str(made.stop_reason))
        finally:
            self._engine.abort(name)


class RemotePartner:
    """An OpenAI-compatible server.

    Args:
        url: of the server, with or without /v1.
        model: the model to ask for; None: the first one that the server lists.
        api_key: sent with each request, if given.
        options: further fields of each request.

    Raises ChatFailed if the server can't be reached, or lists no model.
    """

    def __init__(
        self, url: str, model: str | None, api_key: str | None, options: Mapping[str, Any]
    ) -> None:
        self.usage = Usage()
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._options = options
        if model is None:
            with self._request("/v1/models") as response:
                model = _first_model(self._url, response)
        self.model = model
        self.name = f"{model} at {self._url}"

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                raise ChatFailed(f"{error.code}: {_message(error.read())}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ChatFailed(f"{self._url} can't be reached: {reason}") from None

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {"model": self.model, "messages": messages, "stream": True, **self._options}
        body["stream_options"] = {"include_usage": True}
        with closing(self._request("/v1/chat/completions", body)) as response:
            for event in _events(response):
                if "error" in event:
                    raise ChatFailed(str(event["error"].get("message")))
                if usage := event.get("usage"):
                    details = usage.get("prompt_tokens_details") or {}
                    self.usage = Usage(
                        usage["prompt_tokens"],
                        details.get("cached_tokens") or 0,
                        usage["completion_tokens"],
                    )
                for choice in event.get("choices", []):
                    yield choice["delta"].get("content") or ""


def _first_model(url: str, response: Any) -> str:
    try:
        named = json.load(response)["data"]
        model = named[0]["id"] if named else None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ChatFailed(f"{url} does not answer as an OpenAI-compatible server does") from error
    if model is None:
        raise ChatFailed(f"{url} lists no model; use --model")
    return str(model)


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The events of a stream, decoded. Raises ChatFailed if the stream breaks off."""
    reason = "the stream has no end"
    try:
        for line in response:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(error)
    raise ChatFailed(f"the answer broke off: {reason}")


def _message(raw: bytes) -> str:
    """The message of an error in OpenAI's format, or the beginning of any other body."""
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw.decode(errors="replace")[:200] or "no reason given"


@dataclass(slots=True)
class Conversation:
    """The turns so far, and the commands that change them."""

    partner: Partner
    console: Console
    markdown: bool = False  # whether answers are shown as such
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    failed: bool = False  # whether a line got no answer

    @property
    def messages(self) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def take(self, line: str) -> bool:
        """Handles a line of the user, a command or a question; returns False if the user quits."""
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command == "/new":
            self.turns.clear()
            self._note("a new conversation")
        elif command == "/system":
            self.system = rest.strip() or None
            self.turns.clear()
            self._note(f"a new conversation, {'with this' if self.system else 'without a'} "
                       f"system prompt")  # fmt: skip
        elif command.startswith("/"):
            self.console.print(HELP, style="dim", markup=False)
        else:
            self._answer(line)
        return True

    def _note(self, text: str) -> None:
        if self.console.is_terminal:
            self.console.print(text, style="dim")

    def _answer(self, line: str) -> None:
        """Prints the answer as it comes, and adds question and answer to the turns.

        Ctrl-C stops the answer, of which the beginning is kept; if it fails, neither is kept.
        """
        self.turns.append({"role": "user", "content": line})
        pieces: list[str] = []
        answer = self.partner.answer(self.messages)
        try:
            self._show(answer, pieces)
        except ChatFailed as error:
            self.turns.pop()
            self.failed = True
            if pieces and not self.markdown:
                self.console.out()
            where = self.console if self.console.is_terminal else Console(stderr=True)
            where.print(f"error: {error}", style="red", markup=False, highlight=False)
            return
        finally:
            answer.close()  # type: ignore[attr-defined]
        if not self.markdown:
            self.console.out()
        self.turns.append({"role": "assistant", "content": "".join(pieces)})
        usage = self.partner.usage
        if usage.prompt:
            self._note(
                f"{usage.generated} tokens; {usage.cached} of {usage.prompt} prompt tokens "
                "from the cache"
            )

    def _show(self, answer: Iterator[str], pieces: list[str]) -> None:
        """Shows the answer while it comes, and adds its pieces to `pieces`; until Ctrl-C."""
        stopped = False
        with StreamedMarkdown(self.console) if self.markdown else nullcontext() as shown:
            try:
                for piece in answer:
                    pieces.append(piece)
                    if shown is not None:
                        shown.add(piece)
                    else:
                        self.console.out(piece, end="", highlight=False)
            except KeyboardInterrupt:
                stopped = True
        if stopped:
            self.console.out("[stopped]" if self.markdown else " [stopped]", end="")
            if self.markdown:
                self.console.out()


def run(
    partner: Partner,
    console: Console,
    lines: TextIO,
    system: str | None,
    *,
    markdown: bool = True,
) -> int:
    """Answers each line until they end or one is /quit; returns the exit status.

    In a terminal answers are shown as Markdown, unless `markdown` is False; elsewhere they are
    written as they come.

    The status is 1 if the lines are not typed in a terminal and one got no answer. Ctrl-C at the
    prompt drops what was typed; the second in a row ends the conversation with status 130.
    """
    conversation = Conversation(partner, console, markdown and console.is_terminal, system)
    typed = lines is sys.stdin and lines.isatty()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  # arrows edit the line and bring earlier ones back
        console.print(Text(partner.name, "bold"))
        console.print(f"{HELP}; Ctrl-C stops an answer", style="dim")
    interrupted = False
    while True:
        try:
            line = input("> ") if typed else lines.readline()
        except EOFError:
            console.out()
            return 0
        except KeyboardInterrupt:
            if interrupted or not typed:
                console.out()
                return 130
            interrupted = True
            console.out()
            console.print("Ctrl-C again, Ctrl-D or /quit ends", style="dim")
            continue
        interrupted = False
        if not line and not typed:
            return int(conversation.failed)
        if line.strip() and not conversation.take(line.strip()):
            return 0

"""Conversations in the terminal: with a model in this process, and with a server."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from coppice.frontend import chat
from coppice.frontend.cli import main
from coppice.frontend.engine_client import EngineClient
from coppice.frontend.server import Server
from coppice.frontend.server_options import ServerOptions
from coppice.frontend.text_engine import TextEngine
from coppice.runtime.config import EngineConfig
from coppice.runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FIELDS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


class Scripted:
    """A partner that says what it was told to, and remembers what it was asked."""

    def __init__(self, *answers: str | Exception) -> None:
        self.usage = chat.Usage(10, 4, 2)
        self.asked: list[list[dict[str, str]]] = []
        self._answers = iter(answers)

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        self.asked.append(list(messages))
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            yield "so "
            raise answer
        yield from answer.split("|")


def talk(partner: chat.Partner, text: str, system: str | None = None, **options: object) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False, **options)  # type: ignore[arg-type]
    assert chat.run(partner, console, io.StringIO(text), system) == 0
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_turns_build_on_each_other() -> None:
    partner = Scripted("one|!", "two", "three", "four")
    shown = talk(
        partner, "a\n\n  b\n/system Be kind.\nc\n/new\nd\n/nonsense\n/quit\ne\n", "Be brief."
    )
    assert shown.splitlines() == ["one!", "two", "three", "four", chat.HELP]
    brief, kind = ({"role": "system", "content": text} for text in ("Be brief.", "Be kind."))
    a, b, c, d = ({"role": "user", "content": letter} for letter in "abcd")
    one = {"role": "assistant", "content": "one!"}
    assert partner.asked == [[brief, a], [brief, a, one, b], [kind, c], [kind, d]]


def test_what_fails_is_not_part_of_the_conversation() -> None:
    partner = Scripted(chat.ChatFailed("too long [sic]"), "fine")
    assert talk(partner, "a\nb\n").splitlines() == ["so ", "error: too long [sic]", "fine"]
    assert partner.asked[1] == [{"role": "user", "content": "b"}]


def test_what_is_stopped_stays_as_far_as_it_came() -> None:
    partner = Scripted(KeyboardInterrupt(), "fine")
    assert talk(partner, "a\nb\n").splitlines() == ["so  [stopped]", "fine"]
    assert partner.asked[1][1] == {"role": "assistant", "content": "so "}


def test_a_terminal_is_told_what_the_cache_did() -> None:
    shown = talk(Scripted("[bold]not markup"), "a\n", force_terminal=True)
    assert "[bold]not markup" in shown
    assert "4 of 10 prompt tokens" in shown


def test_a_model_in_this_process(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint), kv_cache_tokens=4096)
    partner = chat.LocalPartner(config, None, PARAMS)
    messages = [{"role": "user", "content": "Where is the key?"}]
    first = "".join(partner.answer(messages))
    assert partner.usage.generated == 6
    assert partner.usage.cached == 0
    more = [*messages, {"role": "assistant", "content": first}, messages[0]]
    assert "".join(partner.answer(more))
    assert partner.usage.cached > 0
    early = partner.answer(messages)
    next(early)
    early.close()  # type: ignore[attr-defined]
    assert not partner._engine.has_unfinished()
    with pytest.raises(chat.ChatFailed, match="prompt must be shorter"):
        next(partner.answer([{"role": "user", "content": "key " * 600}]))


@pytest.fixture
def server_url(
    text_engine: TextEngine, engine_client: Callable[[TextEngine], EngineClient]
) -> Iterator[str]:
    """A server with the key "secret", in a thread of its own: the chat waits for it."""
    found: list[str] = []
    begun, end = threading.Event(), threading.Event()

    async def serve() -> None:
        engine = engine_client(text_engine)
        await engine.start()
        server = Server(engine, "tiny", ServerOptions(api_key=("secret",)))
        runner = web.AppRunner(server.application(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        begun.set()
        await asyncio.to_thread(end.wait)
        await runner.cleanup()
        await engine.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert begun.wait(60)
    yield found[0]
    end.set()
    thread.join()


def test_a_server(server_url: str, checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint), kv_cache_tokens=4096)
    local = chat.LocalPartner(config, None, PARAMS)
    remote = chat.RemotePartner(server_url + "/v1", None, "secret", FIELDS)
    assert remote.model == "tiny"
    messages = [{"role": "user", "content": "Where is the key?"}]
    assert "".join(remote.answer(messages)) == "".join(local.answer(messages))
    assert remote.usage == local.usage
    with pytest.raises(chat.ChatFailed, match=r"400: .*prompt must be shorter"):
        next(remote.answer([{"role": "user", "content": "key " * 600}]))
    with pytest.raises(chat.ChatFailed, match="401: the API key is not known here"):
        chat.RemotePartner(server_url, None, "wrong", {})


def test_the_command(
    server_url: str,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = []
    options = ["--max-tokens", "6", "--ignore-eos"]
    for partner in ([server_url, "--api-key", "secret"], [str(checkpoint)]):
        monkeypatch.setattr("sys.stdin", io.StringIO("Where is the key?\n"))
        assert main(["chat", *partner, *options]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(["chat", server_url]) == 1
    assert "the API key is missing" in capsys.readouterr().err
    assert main(["chat", "http://127.0.0.1:9"]) == 1
    assert "can't be reached" in capsys.readouterr().err
    assert main(["chat", str(checkpoint), "--model", "x"]) == 2
    assert "model is for a server's URL" in capsys.readouterr().err

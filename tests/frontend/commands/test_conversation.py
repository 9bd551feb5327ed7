"""`coppice chat`, with a model in this process and with a server."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from adapter_files import load, save_adapter
from aiohttp import web
from rich.console import Console

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.commands import conversation
from coppice.frontend.commands.main import main
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.server.application import Server
from coppice.frontend.text.engine import TextEngine
from coppice.frontend.text.model.options import TextOptions
from coppice.runtime.config import EngineConfig
from coppice.runtime.requests.lora_request import LoRARequest

FIELDS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


class Scripted:
    """A partner with given answers, which records what it was asked."""

    def __init__(self, *answers: str | Exception) -> None:
        self.name, self.usage = "scripted", conversation.Usage(10, 4, 2)
        self.asked: list[list[dict[str, str]]] = []
        self._answers = iter(answers)

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        self.asked.append(list(messages))
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            yield "so "
            raise answer
        yield from answer.split("|")


def talk(
    partner: conversation.Partner,
    text: str,
    system: str | None = None,
    status: int = 0,
    **options: object,
) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False, **options)  # type: ignore[arg-type]
    assert conversation.run(partner, console, io.StringIO(text), system) == status
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_turns_build_on_each_other() -> None:
    partner = Scripted("one|!", "two", "three", "four")
    shown = talk(
        partner, "a\n\n  b\n/system Be kind.\nc\n/new\nd\n/nonsense\n/quit\ne\n", "Be brief."
    )
    assert shown.splitlines() == ["one!", "two", "three", "four", conversation.HELP]
    brief, kind = ({"role": "system", "content": text} for text in ("Be brief.", "Be kind."))
    a, b, c, d = ({"role": "user", "content": letter} for letter in "abcd")
    one = {"role": "assistant", "content": "one!"}
    assert partner.asked == [[brief, a], [brief, a, one, b], [kind, c], [kind, d]]


def test_a_question_without_an_answer_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    partner = Scripted(conversation.ChatFailed("too long [sic]"), "fine")
    assert talk(partner, "a\nb\n", status=1).splitlines() == ["so ", "fine"]
    assert capsys.readouterr().err == "error: too long [sic]\n"
    assert partner.asked[1] == [{"role": "user", "content": "b"}]


def test_a_stopped_answer_stays_in_the_conversation() -> None:
    partner = Scripted(KeyboardInterrupt(), "fine")
    assert talk(partner, "a\nb\n").splitlines() == ["so  [stopped]", "fine"]
    assert partner.asked[1][1] == {"role": "assistant", "content": "so "}


def test_a_terminal_shows_what_the_cache_did() -> None:
    shown = talk(Scripted("[bold]not markup"), "a\n", force_terminal=True)
    assert "[bold]not markup" in shown
    assert "4 of 10 prompt tokens" in shown


def test_a_terminal_renders_markdown_unless_that_is_off() -> None:
    partner = Scripted("so **bo|ld**", "so **bold**", KeyboardInterrupt(), "fine")
    shown = talk(partner, "a\n", force_terminal=True)
    assert "bold" in shown and "**" not in shown
    assert partner.asked[0] == [{"role": "user", "content": "a"}]
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    assert conversation.run(partner, console, io.StringIO("a\n"), None, markdown=False) == 0
    assert "**bold**" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "[stopped]" in talk(partner, "a\nb\n", force_terminal=True)
    assert partner.asked[-1][1] == {"role": "assistant", "content": "so "}


def test_a_connection_that_breaks_is_reported() -> None:
    """Failures before the answer and in the middle of it, and a server with another API."""
    ok, piece = b"HTTP/1.1 200 OK\r\n\r\n", b'data: {"choices": [{"delta": {"content": "so"}}]}\n\n'
    answers = [ok + b"welcome", b"", ok + piece + b'data: {"choi', ok + piece]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for each in answers:
                connection, _ = listener.accept()
                # Reads all of it, since closing a socket with unread bytes resets the connection.
                head, body = b"", b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(65536)
                head, _, body = head.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: *([0-9]+)", head)
                while length is not None and len(body) < int(length[1]):
                    body += connection.recv(65536)
                connection.sendall(each)
                connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            conversation.ChatFailed, match="does not answer as an OpenAI-compatible server"
        ):
            conversation.RemotePartner(url, None, None, {})
        partner = conversation.RemotePartner(url, "tiny", None, {})
        with pytest.raises(conversation.ChatFailed, match="can't be reached"):
            list(partner.answer([]))
        for reason in ("Unterminated", "the stream has no end"):
            pieces = partner.answer([])
            assert next(pieces) == "so"
            with pytest.raises(conversation.ChatFailed, match=f"the answer broke off: {reason}"):
                list(pieces)
        thread.join()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudoterminal")
@pytest.mark.timeout(120)
def test_in_a_terminal(served: Callable[..., str]) -> None:
    """The arrow up brings earlier lines back, Ctrl-C drops a line, Ctrl-D ends the chat."""
    import pty

    ours, theirs = pty.openpty()
    coppice = Path(sys.executable).parent / "coppice"
    process = subprocess.Popen(
        [coppice, "chat", served("--report-text"), "--max-tokens", "5"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=os.environ | {"TERM": "xterm"},
        # A process that a shell started in the background ignores Ctrl-C, and so do its children.
        preexec_fn=lambda: (
            fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            signal.signal(signal.SIGINT, signal.SIG_DFL),
        ),
    )  # fmt: skip
    os.close(theirs)
    seen = ""

    def until(pattern: str, seconds: float | None = None) -> str:
        """The output since the last call, up to the pattern; "" if the time is over."""
        nonlocal seen
        while not (found := re.search(pattern, seen)):
            if not select.select([ours], [], [], seconds)[0]:
                return ""
            seen += os.read(ours, 4096).decode(errors="replace")
        output, seen = seen[: found.end()], seen[found.end() :]
        return output

    def interrupt(pattern: str) -> None:
        """Sends Ctrl-C until the pattern comes: Python's line editor may handle the first only when
        the next one arrives."""
        for _ in range(10):
            os.write(ours, b"\x03")
            if until(pattern, 5):
                return
        raise AssertionError(f"Ctrl-C ten times, and nothing but {seen!r}")

    try:
        assert f"{served('--report-text')}" in until("/quit(?s:.)*> "), "it names model and server"
        os.write(ours, b"Where is the key?\n")
        until("0 of [0-9]+ prompt tokens from the cache(?s:.)*> ")
        os.write(ours, b"\x1b[A\n")  # the arrow up
        again = until("from the cache(?s:.)*> ")
        assert "Where is the key?" in again
        assert " 0 of " not in again
        os.write(ours, b"half a line")
        until("half a line")
        interrupt("Ctrl-C again, Ctrl-D or /quit ends(?s:.)*> ")
        os.write(ours, b"/new\n")
        until("a new conversation(?s:.)*> ")
        interrupt("again(?s:.)*> ")
        os.write(ours, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_model_in_this_process(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint), kv_cache_tokens=4096)
    partner = conversation.LocalPartner(config, TextOptions(), FIELDS)
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
    with pytest.raises(conversation.ChatFailed, match="prompt must be shorter"):
        next(partner.answer([{"role": "user", "content": "key " * 600}]))


def test_a_model_with_an_adapter(checkpoint: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "french", load(checkpoint))
    config = EngineConfig(model=str(checkpoint), kv_cache_tokens=1024, enable_lora=True)
    asked, found = LoRARequest("french", 1, str(folder)), []
    for lora in (None, asked):
        partner = conversation.LocalPartner(config, TextOptions(), FIELDS, lora)
        found.append("".join(partner.answer([{"role": "user", "content": "Where?"}])))
        assert partner.name.endswith(" with french") == (lora is not None)
    assert found[0] != found[1]
    with pytest.raises(ValueError, match="there is no such folder"):
        conversation.LocalPartner(
            config, TextOptions(), FIELDS, LoRARequest("other", 1, str(tmp_path / "none"))
        )


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
    local = conversation.LocalPartner(config, TextOptions(), FIELDS)
    remote = conversation.RemotePartner(server_url + "/v1", None, "secret", FIELDS)
    assert remote.model == "tiny"
    messages = [{"role": "user", "content": "Where is the key?"}]
    assert "".join(remote.answer(messages)) == "".join(local.answer(messages))
    assert remote.usage == local.usage
    with pytest.raises(
        conversation.ChatFailed, match=r"400: .*maximum context length is 512 tokens"
    ):
        next(remote.answer([{"role": "user", "content": "key " * 600}]))
    with pytest.raises(conversation.ChatFailed, match="401: the API key is not known here"):
        conversation.RemotePartner(server_url, None, "wrong", {})


def test_the_command(
    server_url: str,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = []
    options = ["--max-tokens", "6", "--ignore-eos", "--temperature", "0"]
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
    assert main(["chat", "localhost:8000"]) == 2
    assert "a server's URL begins with http://" in capsys.readouterr().err
    assert main(["chat", str(checkpoint), "--model", "x"]) == 2
    assert "model is for a server's URL" in capsys.readouterr().err

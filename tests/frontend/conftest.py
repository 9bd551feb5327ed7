"""A tiny checkpoint with a real tokenizer and chat template, and engines over it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import torch
from aiohttp import web
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.config import EngineConfig
from coppice.runtime.process.channel import Channel
from coppice.runtime.process.messages import End, Ready

if TYPE_CHECKING:
    from coppice.frontend.client.engine import EngineClient
    from coppice.frontend.http.options import ServerOptions
    from coppice.frontend.text.engine import TextEngine

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CORPUS = (
    "The quick brown fox jumps over the lazy dog while the band plays on in the old town hall.",
    "Where is the key? The key is under the mat, and the mat is at the door of the house.",
    "Crème brûlée, naïve café, Straße, 東京, Привет, 🙂🙃 and numbers such as 1234567890.",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_tokenizer(corpus: Sequence[str] = CORPUS, size: int = 384) -> FastTokenizer:
    """A byte-level BPE trained on a few sentences: rare characters take several tokens."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def byte_fallback_tokenizer(*pieces: str) -> FastTokenizer:
    """In the manner of SentencePiece: a space is the character ▁, unknown characters are bytes.

    The vocabulary is <unk>, the 256 bytes from id 1 on, and then the pieces. The decoder drops the
    space at the beginning of its input.
    """
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *pieces]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.fixture(autouse=True)
def no_handler_stays() -> Iterator[None]:
    """A handler that a test leaves would write to its stream, which is closed by then."""
    yield
    handlers = logging.getLogger().handlers
    left = [each for each in handlers if type(each) is logging.StreamHandler]
    for each in left:
        handlers.remove(each)
    assert not left, "the test leaves a handler of log records: use own_process"


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a test that has a server in this process: logs and priority are as before after it."""
    # A server that gives way to its engine keeps doing so, and all tests after it would.
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    loggers = [logging.getLogger(name) for name in (None, "coppice", "aiohttp.server")]
    before = [(each, each.handlers[:], each.filters[:], each.level) for each in loggers]
    yield
    for logger, handlers, filters, level in before:
        logger.handlers[:], logger.filters[:] = handlers, filters
        logger.setLevel(level)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama whose greedy text varies, with its tokenizer."""
    path = tmp_path_factory.mktemp("tiny-llama")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), eos_token="<|end|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture
def text_engine(checkpoint: Path) -> TextEngine:
    """A real engine over the tiny checkpoint, with a small cache of its own.

    Without drafts: with them a text that a grammar dictates comes in one piece, and a long one ends
    before it can be interrupted. They have tests of their own.
    """
    from coppice.frontend.text.engine import TextEngine

    return TextEngine.load(
        EngineConfig(model=str(checkpoint), kv_cache_tokens=4096, max_num_seqs=8, speculation="off")
    )


class EngineInThread:
    """An `EngineProcess` in a thread: the same loop over the same channel, open to tests."""

    def __init__(self, text_engine: TextEngine) -> None:
        self._connection, self._theirs = Pipe()
        self._answers, self._their_answers = Pipe()
        self._engine = text_engine.engine
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from coppice.runtime.process.channel import Channel
        from coppice.runtime.process.loop import EngineLoop
        from coppice.runtime.process.service import EngineService

        try:
            channels = Channel(self._theirs), Channel(self._their_answers)
            EngineLoop(EngineService(self._engine), *channels).run()
        except BaseException as error:
            self._error = error

    def channels(self) -> tuple[Channel, Channel]:
        return Channel(self._connection), Channel(self._answers)

    def wait(self, timeout: float | None = None) -> str | None:
        self._thread.join(timeout)
        return None if self._thread.is_alive() else f"its thread ended with {self._error!r}"

    def kill(self) -> None:
        raise AssertionError("the engine does not end")


class SlowEngine:
    """The engine of a replica, whose steps take longer, and fail once it is dead."""

    def __init__(self, replica: LiveReplica) -> None:
        self._replica = replica

    def step(self) -> Any:
        if self._replica.dead.wait(self._replica.slow):
            raise RuntimeError("it was killed")
        return self._replica.engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica.engine, name)


class LiveReplica:
    """An engine that listens at 127.0.0.1, with its loop in a thread.

    `slow`: seconds that each step takes besides. `end` ends it as if its process had died.
    """

    def __init__(self, text_engine: TextEngine) -> None:
        from coppice.runtime.process.loop import EngineLoop
        from coppice.runtime.process.service import EngineService

        self.engine = text_engine.engine
        self.slow = 0.0
        self.dead = threading.Event()
        ours, theirs = Pipe()
        self._answers, their_answers = Pipe()
        self._parent = Channel(ours)
        self.loop = EngineLoop(
            EngineService(SlowEngine(self)), Channel(theirs), Channel(their_answers), "127.0.0.1"
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        (ready,) = self._parent.receive()
        assert isinstance(ready, Ready)
        assert ready.door is not None
        self.door = ready.door

    def _run(self) -> None:
        try:
            self.loop.run()
        except RuntimeError:
            assert self.dead.is_set()

    def end(self) -> None:
        self.dead.set()
        self._parent.send(End())
        self._thread.join(20)
        assert not self._thread.is_alive()


# What a server is tried with: its own engine, or replicas behind a hub.
BEHIND = ["engine", pytest.param("ingress", marks=pytest.mark.slow)]


def client_of(text_engine: TextEngine, behind: str, **options: Any) -> EngineClient:
    """A client, to be started, of an engine in a thread of the test, directly or by a hub."""
    from coppice.frontend.client.engine import EngineClient
    from coppice.frontend.router.client import ReplicasClient
    from coppice.frontend.router.hub import Hub

    around = text_engine.tokenizer, text_engine.defaults
    if behind == "engine":
        return EngineClient(lambda: EngineInThread(text_engine), *around, **options)
    replica, hub = LiveReplica(text_engine), Hub()
    hub.join("replica", "127.0.0.1", replica.door)
    hub._engine = text_engine.engine  # type: ignore[attr-defined]  # as `EngineInThread` has it

    class Client(ReplicasClient):
        async def stop(self) -> None:
            await super().stop()
            await asyncio.to_thread(replica.end)

    return Client(hub, *around, **options)


@pytest.fixture(params=BEHIND)
def engine_client(request: pytest.FixtureRequest) -> Callable[..., EngineClient]:
    """Makes a client, to be started, of an engine that runs in a thread of the test."""
    return partial(client_of, behind=request.param)


@pytest.fixture(scope="session", params=BEHIND)
def served(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """``served(*options)`` is the URL of a `coppice serve` over the tiny checkpoint.

    The model's name is the checkpoint's path. Each set of options is started once a session, in a
    process of its own.
    """
    running: dict[tuple[str, ...], tuple[subprocess.Popen[str], str]] = {}

    def serve(*options: str) -> str:
        if options not in running:
            limits = ["--port", "0", "--kv-cache-tokens", "4096", "--max-num-seqs", "8"]
            limits += ["--drain-grace", "0"]
            if request.param == "ingress":
                limits += ["--replicas", "2"]
            command = (
                "import sys; from coppice.frontend.commands import main; sys.exit(main.main())"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", command, "serve", checkpoint, *limits, *options],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            assert process.stdout is not None
            lines = list(iter_until(process.stdout, "url "))
            assert lines, "the server did not start"
            assert lines[-1].startswith("url "), f"the server did not start: {lines}"
            running[options] = process, lines[-1].split()[-1]
        return running[options][1]

    yield serve
    for process, _ in running.values():
        process.terminate()
    for process, _ in running.values():
        process.communicate(timeout=60)


def iter_until(lines: Iterable[str], beginning: str) -> Iterator[str]:
    """Lines up to the first one with this beginning."""
    for line in lines:
        yield line
        if line.startswith(beginning):
            return


TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ greeting or '' }}{% endif %}"
)


# As Llama 3.1 is shown tools, and as it writes calls.
LLAMA_TEMPLATE = (
    "{% if tools %}<|system|>Respond with JSON for a function call: "
    '{"name": function name, "parameters": dictionary of argument name and its value}.\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tool_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a template that knows tools, and room for longer prompts."""
    return _with_template(checkpoint, tmp_path_factory.mktemp("tiny-tools"), TOOL_TEMPLATE)


@pytest.fixture(scope="session")
def llama_tool_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with tools as Llama takes them."""
    return _with_template(checkpoint, tmp_path_factory.mktemp("tiny-llama-tools"), LLAMA_TEMPLATE)


def _with_template(checkpoint: Path, folder: Path, template: str) -> Path:
    path = folder / "model"
    shutil.copytree(checkpoint, path)
    fast = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    fast.chat_template = template
    fast.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 4096
    (path / "config.json").write_text(json.dumps(config))
    return path


@asynccontextmanager
async def serving(
    engine: EngineClient,
    options: ServerOptions | None = None,
    *,
    send_buffer: int | None = None,
) -> AsyncIterator[tuple[aiohttp.ClientSession, int]]:
    """A server of the model "tiny", over an engine that it starts: a session, and the port.

    `send_buffer` is in bytes, for each of its connections.
    """
    from coppice.frontend.server.application import Server

    await engine.start()
    app = Server(engine, "tiny", options).application()
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    await web.SockSite(runner, listener).start()
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield session, listener.getsockname()[1]
    await runner.cleanup()
    await engine.stop()


class LiveServer:
    """A server with its own event loop and thread, so that any client can be tried on it.

    The model is named "tiny". `url` is where it is, without a slash at the end.
    """

    behind = "engine"

    def __init__(self, text_engine: TextEngine, **options: Any) -> None:
        from coppice.frontend.http.options import ServerOptions
        from coppice.frontend.server.application import Server

        self.text_engine = text_engine
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        given = ServerOptions(**options)
        self.engine = client_of(text_engine, self.behind, longest_delay=given.max_stream_delay)
        self._server = Server(self.engine, "tiny", given)
        self.run(self._start())

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine returns, run in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _start(self) -> None:
        await self.engine.start()
        await self._server.load_adapters()
        self._runner = web.AppRunner(
            self._server.application(), handler_cancellation=True, shutdown_timeout=5
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def until_idle(self) -> None:
        """Waits until nothing runs, and checks that no page is held."""
        deadline = time.monotonic() + 20
        while self.engine.running or self.run(self.engine.ask("has_unfinished")):
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.005)
        assert self.run(self.engine.ask("cache_report")).pages_held == 0

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self.engine.stop()

    def close(self) -> None:
        """Ends the server and its thread."""
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LiveIngress(LiveServer):
    """The same over a replica behind a hub."""

    behind = "ingress"


@pytest.fixture(scope="session", params=BEHIND)
def live_server(request: pytest.FixtureRequest) -> type[LiveServer]:
    """The class, for tests that want a server with options of their own."""
    return LiveServer if request.param == "engine" else LiveIngress


@pytest.fixture(scope="module")
def tool_server(tool_checkpoint: Path, live_server: type[LiveServer]) -> Iterator[LiveServer]:
    """A server over the checkpoint that knows tools; at the end nothing may run or be held."""
    from coppice.frontend.text.engine import TextEngine

    config = EngineConfig(
        model=str(tool_checkpoint), kv_cache_tokens=16384, max_num_seqs=8, speculation="off"
    )
    server = live_server(TextEngine.load(config))
    yield server
    server.until_idle()
    server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright; without either the test is skipped."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright to drive a browser"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs the browser chromium (Debian's package of that name)")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=chromium,
            args=["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield launched
        launched.close()

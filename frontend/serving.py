"""Starts the server, says where it is and how to use it, and stops it in an orderly way."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import socket

from aiohttp import web

from coppice.frontend.engine_thread import EngineThread
from coppice.frontend.server import Server
from coppice.frontend.text_engine import TextEngine

DRAIN_SECONDS = 30.0


def serve(text_engine: TextEngine, *, model: str, listener: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM, then lets running requests end.

    New connections are refused at once when a signal comes. Requests that take longer than
    `DRAIN_SECONDS` from there on are aborted, and a second signal aborts them at once.

    Args:
        text_engine: the loaded model.
        model: the name under which requests ask for it.
        listener: bound to the address to serve at; it is closed at the end.
    """
    asyncio.run(_serve(text_engine, model, listener))


async def _serve(text_engine: TextEngine, model: str, listener: socket.socket) -> None:
    engine = EngineThread(text_engine)
    runner = web.AppRunner(
        Server(engine, model).application(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=DRAIN_SECONDS,
    )
    await runner.setup()
    await web.SockSite(runner, listener).start()
    engine.start()
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, lambda: (hurry if stop.is_set() else stop).set())
    print(_greeting(text_engine, model, *listener.getsockname()[:2]), flush=True)
    await stop.wait()
    print(f"stopping; requests still running: {engine.running}", flush=True)
    await _drain(runner, engine, hurry)


async def _drain(runner: web.AppRunner, engine: EngineThread, hurry: asyncio.Event) -> None:
    """Waits for the running requests, until the time is over or a second signal comes."""
    closing = asyncio.create_task(runner.cleanup())
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({closing, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    await engine.stop()  # whatever still runs ends with an error that says so
    await closing


def _greeting(text_engine: TextEngine, model: str, host: str, port: int) -> str:
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{port}"
    if text_engine.tokenizer.wrapped.chat_template:
        path = "/v1/chat/completions"
        # The demo model can do nothing but look things up in the document it is given.
        talk = {"user": "Hello"}
        if model == "demo":
            talk = {
                "system": "People: The badge of Mara Ellison is NK-48.",
                "user": "Which badge does Mara Ellison carry?",
            }
        messages = [{"role": role, "content": content} for role, content in talk.items()]
        body: dict[str, object] = {"model": model, "messages": messages}
    else:
        path, body = "/v1/completions", {"model": model, "prompt": "Hello"}
    return "\n".join(
        [
            f"model   {model}",
            f"memory  {text_engine.engine.memory}",
            f"url     {url}",
            f"try     curl {url}{path} -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body))}",
        ]
    )

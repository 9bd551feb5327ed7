"""Starts the server, prints where it is and how to use it, and lets it end in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from functools import partial

from aiohttp import web

from coppice.frontend.client.engine import EngineClient
from coppice.frontend.client.process import EngineProcess
from coppice.frontend.http import logs
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.server.application import Server
from coppice.frontend.server.first_request import first_request
from coppice.frontend.text.model.loading import load_around
from coppice.frontend.text.model.options import TextOptions
from coppice.runtime.config import EngineConfig

LAST_WORDS_SECONDS = 5.0  # to send the rest of the answers when the engine has ended
YOUNG_OBJECTS = (
    20_000  # allocated between two garbage collections, each of which visits all live streams
)


def serve(
    config: EngineConfig,
    text: TextOptions,
    options: ServerOptions,
    *,
    listener: socket.socket,
) -> None:
    """Serves until SIGINT or SIGTERM, then lets running requests end.

    From the signal on, new requests are refused; for `options.drain_grace` seconds after SIGTERM
    with an answer, so that a load balancer sees why, and then new connections are, too. Requests
    that still run `options.drain_timeout` seconds later are aborted; a second signal aborts them at
    once. Where there are tiers, the engine stores what its cache has in the time that is left.

    Args:
        config: of the engine; its `model` is the name under which requests ask for it, unless the
            options have another one.
        text: of the tokenizer, and of what requests get that they do not set.
        options: of the server itself.
        listener: a socket that is bound to the server's address; it is closed at the end.

    Raises:
        ValueError: there is no such model, it is not supported, its memory does not suffice, the
            certificate is none, or an adapter can't be loaded.
    """
    loaded = load_around(config, text, without_torch=True)
    logs.configure(options.log_format, options.log_level)
    setup = partial(logs.configure, options.log_format, options.log_level)
    launch = partial(EngineProcess, loaded.config, setup=setup, **loaded.engine_arguments)
    engine = EngineClient(
        launch,
        loaded.tokenizer,
        loaded.defaults,
        longest_delay=options.max_stream_delay,
        gives_way=True,
        timeout=options.engine_timeout or None,
    )
    # At once, since loading takes a while; the rest is printed after it.
    print(f"model   {config.model}", flush=True)
    if loaded.tokenizer.chat_template is not None:
        loaded.tokenizer.load_wrapped_soon()
    asyncio.run(_serve(engine, config.model, options, listener))


async def _serve(
    engine: EngineClient, model: str, options: ServerOptions, listener: socket.socket
) -> None:
    stop, hurry, signals = asyncio.Event(), asyncio.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def end(signum: int) -> None:
        signals.append(signum)
        (hurry if stop.is_set() else stop).set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, end, signum)
    if not await _started(engine, stop):
        return
    server = Server(engine, model, options)
    try:
        await server.load_adapters()
    except ValueError:
        await engine.stop()
        raise
    runner = web.AppRunner(
        server.application(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=options.drain_timeout + LAST_WORDS_SECONDS,
    )
    await runner.setup()
    await web.SockSite(runner, listener, ssl_context=options.tls()).start()
    assert runner.server is not None
    watching = asyncio.create_task(server.connections.watch(runner.server))
    gc.freeze()  # what is loaded stays: no garbage collection needs to visit it
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    print(greeting(engine, model, options, *listener.getsockname()[:2]), flush=True)
    await stop.wait()
    print(f"stopping; requests still running: {engine.running}", flush=True)
    server.drain()
    if signals[0] == signal.SIGTERM:
        await _first_of(hurry, options.drain_grace)
    watching.cancel()
    await _drain(runner, engine, hurry, options.drain_timeout)


async def _started(engine: EngineClient, stop: asyncio.Event) -> bool:
    """Loads the model; False if a signal came meanwhile."""
    starting, stopped = asyncio.create_task(engine.start()), asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await engine.stop()
        return False
    stopped.cancel()
    await starting
    return True


async def _first_of(event: asyncio.Event, seconds: float) -> None:
    """Waits for the event, or until the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _drain(
    runner: web.AppRunner, engine: EngineClient, hurry: asyncio.Event, timeout: float
) -> None:
    """Waits for the running requests, at most `timeout` seconds or until a second signal.

    In what they leave of that time the engine stores what its cache has, where there are tiers.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    closing = asyncio.create_task(runner.cleanup())
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({closing, hurried}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    left = 0.0 if hurry.is_set() else max(0.0, deadline - loop.time())
    # Requests that still run end with an error.
    stopping = asyncio.create_task(engine.stop(left))
    await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if left and hurry.is_set():
        engine.hurry()
    hurried.cancel()
    await stopping
    await closing


def greeting(engine: EngineClient, model: str, options: ServerOptions, host: str, port: int) -> str:
    """The lines that are printed when the server is ready."""
    address = f"[{host}]" if ":" in host else host
    scheme = "http" if options.ssl_certfile is None else "https"
    url = f"{scheme}://{address}:{port}"
    assert engine.ready is not None
    first = first_request(url, model, engine.tokenizer, has_keys=bool(options.keys()))
    return "\n".join(
        [
            f"memory  {engine.ready.memory}",
            f"default {engine.defaults}",
            f"url     {url}",
            f"try     {first}",
            f"report  {url}/cache",
        ]
    )

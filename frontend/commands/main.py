"""The command `coppice`: generate, chat, serve, report, demo and replay."""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from coppice import __version__
from coppice.frontend.commands.options import (
    SERVER_DEFAULTS,
    add_engine_options,
    add_sampling_options,
    add_server_options,
    engine_options,
    sampling_fields,
    sampling_params,
    server_options,
)
from coppice.runtime.config import EngineConfig

if TYPE_CHECKING:
    from coppice.frontend.python.llm import LLM
    from coppice.frontend.text.outputs import RequestOutput

TOKENIZER_HELP = "where the tokenizer is, if not with the model"
MODEL_HELP = "a Hugging Face directory, a hub id, or `demo` for the model that comes along"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status: 0, 1 if something failed, 2 for a wrong argument."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character gets a question mark
            stream.reconfigure(errors="replace")
    parsed = build_parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except ValueError as error:
        print(f"coppice {parsed.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return 141
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="coppice",
        description="An LLM engine in which a radix tree owns the KV cache.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"coppice {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="continue prompts, or answer questions", allow_abbrev=False
    )
    generate.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    source = generate.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt (may be repeated)"
    )
    source.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="a prompt a line, empty lines left out; without either, standard input is read so",
    )
    generate.add_argument(
        "--chat", action="store_true", help="put each prompt as a question to the chat template"
    )
    generate.add_argument(
        "--report", action="store_true", help="end with the prefix-hit report of the cache"
    )
    generate.add_argument("--tokenizer", metavar="MODEL", help=TOKENIZER_HELP)
    add_sampling_options(generate)
    add_engine_options(generate)
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser(
        "chat", help="talk with a server, or with a model in this process", allow_abbrev=False
    )
    chat.add_argument("partner", metavar="MODEL-or-URL", help=f"a server's URL; or {MODEL_HELP}")
    chat.add_argument("--system", metavar="TEXT", help="the system prompt to begin with")
    chat.add_argument("--model", metavar="NAME", help="which of the server's models")
    chat.add_argument(
        "--api-key", metavar="KEY", help="key for the server (default: the variable OPENAI_API_KEY)"
    )
    chat.add_argument("--tokenizer", metavar="MODEL", help=TOKENIZER_HELP)
    add_sampling_options(chat, max_tokens=1024)
    add_engine_options(chat)
    chat.set_defaults(run=run_chat)

    serve = commands.add_parser(
        "serve", help="start an OpenAI-compatible server", allow_abbrev=False
    )
    serve.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    serve.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    serve.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port; 0: a free one (default: 8000)"
    )
    serve.add_argument("--tokenizer", metavar="MODEL", help=TOKENIZER_HELP)
    add_server_options(serve)
    add_engine_options(serve, **SERVER_DEFAULTS)
    serve.set_defaults(run=run_serve)

    report = commands.add_parser(
        "report",
        help="what a server's cache saves and why tokens miss, live",
        description="Shows the report of a running server, every few seconds until interrupted, "
        "or one that was saved from its /cache/report.",
        allow_abbrev=False,
    )
    report.add_argument(
        "source", metavar="URL-or-FILE", help="a server, such as http://localhost:8000, or a file"
    )
    report.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="time between two looks (default: %(default)s)",
    )
    report.add_argument(
        "--once", action="store_true", help="print it once, as when it is not for a terminal"
    )
    report.add_argument(
        "--api-key",
        default=os.environ.get("COPPICE_API_KEY"),
        metavar="KEY",
        help="if the server asks for one (default: the environment's COPPICE_API_KEY)",
    )
    report.set_defaults(run=run_report)

    demo = commands.add_parser(
        "demo",
        help="many questions over one shared document, with the cache on and off",
        allow_abbrev=False,
    )
    demo.set_defaults(run=run_demo)

    replay = commands.add_parser(
        "replay",
        help="what the cache would do for a trace of requests, without a model",
        description="Replays a trace of requests through the real tree and scheduler, without a "
        "model, and tells what the cache did and why tokens missed.",
        allow_abbrev=False,
    )
    _add_replay_options(replay)
    replay.set_defaults(run=run_replay)
    return parser


def _add_replay_options(replay: argparse.ArgumentParser) -> None:
    defaults = {option.name: option for option in fields(EngineConfig)}
    policy, page_size = defaults["eviction_policy"], defaults["page_size"]
    replay.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="a file with a request a line: Mooncake's format, or JSON with a prompt of token ids "
        "or text (keys prompt, output or output_tokens, namespace, timestamp in seconds)",
    )
    replay.add_argument(
        "--format",
        default="auto",
        metavar="NAME",
        help="auto, mooncake or jsonl (default: auto, which looks at the first line)",
    )
    replay.add_argument(
        "--policy",
        default=policy.default,
        metavar="NAME",
        help=f"{policy.metadata['help']} (default: {policy.default})",
    )
    replay.add_argument(
        "--pool",
        default="1000000",
        metavar="TOKENS",
        help="size of the KV cache in tokens, or unlimited (default: %(default)s)",
    )
    replay.add_argument(
        "--page-size",
        type=int,
        default=page_size.default,
        metavar="N",
        help=f"{page_size.metadata['help']} (default: {page_size.default})",
    )
    replay.add_argument(
        "--concurrency",
        type=int,
        default=1,
        metavar="N",
        help="most requests that run at once, while as many of the next ones wait (default: 1)",
    )
    replay.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="whose tokenizer turns texts into tokens and back: a directory, a hub id or `demo`",
    )
    replay.add_argument("--limit", type=int, metavar="N", help="read only the first N requests")
    replay.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    replay.add_argument(
        "--html", type=Path, metavar="FILE", help="write the report as a page that opens offline"
    )


def run_generate(arguments: argparse.Namespace) -> int:
    """`coppice generate`."""
    prompts = _prompts(arguments)
    params = sampling_params(arguments)
    from coppice.frontend.python.llm import LLM
    from coppice.frontend.text.outputs import GenerationError

    llm = LLM(arguments.model, arguments.tokenizer, **engine_options(arguments))
    failure = None
    try:
        if arguments.chat:
            turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(turns, params)
        else:
            outputs = llm.generate(prompts, params)
    except GenerationError as error:
        failure, outputs = error, error.outputs
    _print_outputs(prompts, outputs)
    if arguments.report:
        _print_report(llm)
    if failure is not None:
        print(f"coppice generate: {failure}", file=sys.stderr)
        return 1
    return 0


def _has_scheme(name: str, value: str) -> None:
    """Raises ValueError for an address that lacks one, which would be taken for a model or file."""
    if re.fullmatch(r"[\w.-]+:\d{1,5}(/.*)?", value) and not Path(value).exists():
        raise ValueError(f"{name}: a server's URL begins with http://, got {value!r}")


def run_chat(arguments: argparse.Namespace) -> int:
    """`coppice chat`."""
    params = sampling_params(arguments)
    from rich.console import Console

    from coppice.frontend.commands import chat

    partner: chat.Partner
    try:
        _has_scheme("MODEL-or-URL", arguments.partner)
        if arguments.partner.startswith(("http://", "https://")):
            key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
            fields = sampling_fields(arguments)
            partner = chat.RemotePartner(arguments.partner, arguments.model, key, fields)
        else:
            for name in ("model", "api_key"):
                if getattr(arguments, name) is not None:
                    raise ValueError(f"{name} is for a server's URL, got {arguments.partner!r}")
            config = EngineConfig(model=arguments.partner, **engine_options(arguments))
            partner = chat.LocalPartner(config, arguments.tokenizer, params)
    except chat.ChatFailed as error:
        print(f"coppice chat: {error}", file=sys.stderr)
        return 1
    return chat.run(partner, Console(highlight=False), sys.stdin, arguments.system)


def run_serve(arguments: argparse.Namespace) -> int:
    """`coppice serve`."""
    if not 0 <= arguments.port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {arguments.port}")
    config = EngineConfig(model=arguments.model, **engine_options(arguments))
    options = server_options(arguments)
    options.keys()  # while nothing has been loaded
    try:
        listener = _bound(arguments.host, arguments.port)
    except OSError as error:
        where = f"{arguments.host}:{arguments.port}"
        print(f"coppice serve: cannot listen on {where}: {error.strerror}", file=sys.stderr)
        return 1
    with listener:
        from coppice.frontend.serve import serve

        serve(config, arguments.tokenizer, options, listener=listener)
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    """`coppice report`."""
    from rich.console import Console

    from coppice.frontend.commands.report import ReportUnavailable, run

    _has_scheme("URL-or-FILE", arguments.source)
    try:
        run(
            Console(highlight=False),
            arguments.source,
            interval=arguments.interval,
            once=arguments.once,
            api_key=arguments.api_key,
        )
    except ReportUnavailable as error:
        print(f"coppice report: {error}", file=sys.stderr)
        return 1
    return 0


def run_demo(arguments: argparse.Namespace) -> int:
    """`coppice demo`."""
    from rich.console import Console

    from coppice.frontend.demo.run import run

    run(Console())
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    """`coppice replay`."""
    from rich.console import Console

    from coppice.frontend.replay.run import run

    run(
        Console(highlight=False),
        arguments.trace,
        format=arguments.format,
        policy=arguments.policy,
        pool=arguments.pool,
        page_size=arguments.page_size,
        concurrency=arguments.concurrency,
        tokenizer=arguments.tokenizer,
        limit=arguments.limit,
        json_file=arguments.json,
        html_file=arguments.html,
    )
    return 0


def _bound(host: str, port: int) -> socket.socket:
    """Takes the port before the minutes that a large model may take to load.

    It does not listen yet, so that clients are refused instead of kept waiting.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts that the arguments name. Raises ValueError if there is none."""
    if arguments.prompt is not None:
        return list(arguments.prompt)
    if arguments.prompts_file is not None:
        try:
            text = arguments.prompts_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"prompts-file cannot be read: {error}") from error
        where = str(arguments.prompts_file)
    else:
        if sys.stdin.isatty():
            raise ValueError("prompt: none given; use --prompt, --prompts-file or standard input")
        text, where = sys.stdin.read(), "standard input"
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"prompt: there is none in {where}")
    return lines


def _print_outputs(prompts: Sequence[str], outputs: Sequence[RequestOutput]) -> None:
    """Only the text for one prompt; with each prompt above its text for several."""
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if len(prompts) > 1:
            print(f"[{index + 1}/{len(prompts)}] {prompt}")
        print(output.outputs[0].text)
        if len(prompts) > 1 and index + 1 < len(prompts):
            print()


def _print_report(llm: LLM) -> None:
    from rich.console import Console

    from coppice.frontend.report.tables import render_report

    tokenizer = llm.get_tokenizer()
    console = Console()
    console.print()
    console.print(render_report(llm.cache_report(), lambda ids: str(tokenizer.decode(list(ids)))))

"""`coppice chat`: a conversation with a server, or with a model in this process."""

from __future__ import annotations

import argparse
import os
import sys

from coppice.frontend.commands.foreign import add_foreign_options
from coppice.frontend.commands.options import (
    MODEL_HELP,
    Subparsers,
    adapter,
    add_adapter_option,
    add_engine_options,
    add_sampling_options,
    add_text_options,
    check_scheme,
    engine_options,
    sampling_fields,
    text_options,
)
from coppice.runtime.config import EngineConfig


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice chat`."""
    parser = commands.add_parser(
        "chat", help="talk with a server, or with a model in this process", allow_abbrev=False
    )
    parser.shorten(
        "system model api_key markdown temperature top_p max_tokens stop tokenizer dtype "
        "quantization kv_cache_tokens"
    )
    parser.add_argument("partner", metavar="MODEL-or-URL", help=f"a server's URL, or {MODEL_HELP}")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt at the beginning")
    parser.add_argument("--model", metavar="NAME", help="which of the server's models")
    parser.add_argument(
        "--markdown",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show answers as Markdown, if the output is a terminal (default: on)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="key for the server (default: the environment variable OPENAI_API_KEY)",
    )
    add_sampling_options(parser, max_tokens=1024)
    add_text_options(parser)
    add_engine_options(parser)
    add_adapter_option(parser)
    add_foreign_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises ValueError for a wrong argument."""
    given = sampling_fields(arguments)
    from rich.console import Console

    from coppice.frontend.commands import conversation

    partner: conversation.Partner
    try:
        check_scheme("MODEL-or-URL", arguments.partner)
        if arguments.partner.startswith(("http://", "https://")):
            if arguments.lora is not None:
                raise ValueError(
                    f"lora is for a model in this process, got {arguments.lora!r}: a server's "
                    f"adapter is asked for as a model, with --model NAME"
                )
            key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
            partner = conversation.RemotePartner(arguments.partner, arguments.model, key, given)
        else:
            for name in ("model", "api_key"):
                if getattr(arguments, name) is not None:
                    raise ValueError(f"{name} is for a server's URL, got {arguments.partner!r}")
            config = EngineConfig(model=arguments.partner, **engine_options(arguments))
            partner = conversation.LocalPartner(
                config, text_options(arguments), given, adapter(arguments)
            )
    except conversation.ChatFailed as error:
        print(f"coppice chat: {error}", file=sys.stderr)
        return 1
    return conversation.run(
        partner,
        Console(highlight=False),
        sys.stdin,
        arguments.system,
        markdown=arguments.markdown,
    )

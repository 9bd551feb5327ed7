"""The command line's options of engine, server and sampling, made from their dataclasses."""

from __future__ import annotations

import argparse
import json
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from coppice.frontend.commands.foreign import flags_of
from coppice.frontend.commands.parser import CommandParser, Several
from coppice.frontend.http.options import ServerOptions
from coppice.frontend.python.foreign_options import same_value
from coppice.frontend.router.cluster.settings import ClusterOptions
from coppice.frontend.text.model.generation_config import NAMES
from coppice.frontend.text.model.options import TextOptions
from coppice.runtime.config import EngineConfig
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.sampling_params import SamplingParams

Subparsers: TypeAlias = "argparse._SubParsersAction[CommandParser]"
"""What `add_subparsers` returns, to which each command adds its parser."""

MODEL_HELP = "a Hugging Face directory, a hub id, or `demo` for the model that is included"

# Enough tokens for a text; all other parameters have the defaults that they have everywhere.
MAX_TOKENS = 128

_SAMPLING_HELP = {
    "temperature": "0 takes the most probable token; higher values make the text more varied",
    "top_p": "only the most probable tokens whose probabilities add up to this",
    "top_k": "only this many of the most probable tokens; 0: all",
    "min_p": "only tokens at least this fraction as probable as the most probable one",
    "presence_penalty": "subtracted from the logits of tokens that were generated before",
    "frequency_penalty": "subtracted from them for each time that they were generated",
    "repetition_penalty": "divides the logits of tokens in prompt and output; 1: no penalty",
    "max_tokens": "most tokens to generate for each prompt",
    "min_tokens": "fewest tokens to generate before anything may end the text",
    "ignore_eos": "continue after the model's end-of-text token",
}


def add_text_options(parser: CommandParser) -> None:
    """Adds an option for each field of `TextOptions`."""
    hints = get_type_hints(TextOptions)
    for option in fields(TextOptions):
        group = parser.grouped(option.name, "tokenizer and requests")
        _add(group, option, hints[option.name], option.metadata["help"], option.default)


def text_options(arguments: argparse.Namespace) -> TextOptions:
    """Their values. Raises ValueError if one is not acceptable."""
    return TextOptions(**_values(arguments, [option.name for option in fields(TextOptions)]))


def add_engine_options(parser: CommandParser, **defaults: Any) -> None:
    """Adds an option for each field of `EngineConfig` but the model.

    `defaults` replace the dataclass's, by the name of the field.
    """
    hints = get_type_hints(EngineConfig)
    for option in fields(EngineConfig):
        if option.name != "model":
            default = defaults.get(option.name, option.default)
            group = parser.grouped(option.name, "engine")
            _add(group, option, hints[option.name], option.metadata["help"], default)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the engine's options, for `EngineConfig` or `LLM`."""
    names = [each.name for each in fields(EngineConfig) if each.name != "model"]
    values = _values(arguments, names)
    if getattr(arguments, "lora", None) is not None:
        values["enable_lora"] = True
    return values


def add_adapter_option(parser: CommandParser) -> None:
    """Adds `--lora`."""
    group = parser.grouped("lora", "engine")
    group.add_argument(
        "--lora", metavar="PATH", help="an adapter, as PEFT saves it, with which the model answers"
    )


def adapter(arguments: argparse.Namespace) -> LoRARequest | None:
    """The adapter of `--lora`, for an engine with `enable_lora`. Raises ValueError if empty."""
    path = arguments.lora
    return None if path is None else LoRARequest(Path(path).name or path, 1, path)


def add_server_options(parser: CommandParser) -> None:
    """Adds an option for each field of `ServerOptions`."""
    hints = get_type_hints(ServerOptions)
    for option in fields(ServerOptions):
        group = parser.grouped(option.name, "server")
        _add(group, option, hints[option.name], option.metadata["help"], option.default)


def server_options(arguments: argparse.Namespace) -> ServerOptions:
    """The server options' values. Raises ValueError if one is out of range."""
    return ServerOptions(**_values(arguments, [option.name for option in fields(ServerOptions)]))


def add_cluster_options(parser: CommandParser) -> None:
    """Adds an option for each field of `ClusterOptions`."""
    hints = get_type_hints(ClusterOptions)
    for option in fields(ClusterOptions):
        group = parser.grouped(option.name, "replicas")
        _add(group, option, hints[option.name], option.metadata["help"], option.default)


def cluster_options(arguments: argparse.Namespace) -> ClusterOptions:
    """Their values. Raises ValueError if one is out of range."""
    return ClusterOptions(**_values(arguments, [option.name for option in fields(ClusterOptions)]))


def add_sampling_options(parser: CommandParser, *, max_tokens: int = MAX_TOKENS) -> None:
    """Adds `--stop` and the options of `SamplingParams` in `_SAMPLING_HELP`.

    All but `max_tokens` have no default of their own: what is not given is the model's default (see
    `GenerationDefaults`), in every command and the server alike.
    """
    group = parser.add_argument_group(
        "sampling",
        "The model's own default is that of its generation_config.json, in all commands, server "
        "and Python alike; a chat with a server has that of the server's model.",
    )
    hints = get_type_hints(SamplingParams)
    for option in fields(SamplingParams):
        if option.name in _SAMPLING_HELP:
            text, default = _SAMPLING_HELP[option.name], None
            if option.name == "max_tokens":
                default = max_tokens
            elif option.name in NAMES:
                text += f" (default: the model's own, else {option.default:g})"
            elif option.type != "bool":
                text += f" (default: {option.default:g})"
            _add(group, option, hints[option.name], text, default)
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the text before this string (may be repeated)",
    )


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that are set, by the names of `SamplingParams` and of the API.

    Raises ValueError if one is out of range.
    """
    values = {n: v for n, v in _values(arguments, _SAMPLING_HELP).items() if v is not None}
    values |= {"stop": arguments.stop} if arguments.stop else {}
    SamplingParams(**values)
    return values


def _values(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of these options, with tuples for lists, as the dataclasses take them."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def _add(
    group: argparse._ArgumentGroup, option: Field[Any], hint: Any, text: str, default: Any
) -> None:
    """Adds the option of one field: `hint` is its type, `text` its help."""
    flags = flags_of(option.name)
    if len(flags) > 1:
        text += f"; also {', '.join(flags[1:])}"
    if get_origin(hint) is tuple:  # argparse copies the list before it appends
        several: dict[str, Any] = {"action": "append"}
        if option.metadata.get("several"):  # as many as follow, each time
            several = {"action": Several, "nargs": "+"}
        group.add_argument(*flags, **several, default=[], metavar="TEXT", help=text)
        return
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if hint is bool:
        if default is not None:
            text += f" (default: {'on' if default else 'off'})"
        group.add_argument(
            *flags, action=argparse.BooleanOptionalAction, default=default, help=text
        )
        return
    if get_origin(hint) is tuple:
        group.add_argument(*flags, nargs="+", type=int, default=default, metavar="N", help=text)
        return
    if get_origin(hint) is Mapping:
        group.add_argument(*flags, type=_json_object, default=default, metavar="JSON", help=text)
        return
    if default is not None:
        text += f" (default: {default})"
    metavar = {int: "N", float: "X"}.get(hint, "NAME")
    kind = partial(same_value, option.name) if hint is str else hint
    group.add_argument(*flags, type=kind, default=default, metavar=metavar, help=text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}, got {text!r}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def check_scheme(name: str, value: str) -> None:
    """Raises ValueError if `value` is a URL without http://, such as localhost:8000.

    It would be taken for a model or a file. `name` is the argument's name, for the message.
    """
    if re.fullmatch(r"[\w.-]+:\d{1,5}(/.*)?", value) and not Path(value).exists():
        raise ValueError(f"{name}: a server's URL begins with http://, got {value!r}")

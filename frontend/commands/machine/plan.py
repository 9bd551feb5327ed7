"""`coppice plan`: what a model takes and what fits on a device, from its `config.json` alone."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from functools import partial

from coppice.frontend.commands.foreign import add_foreign_options, flags_of
from coppice.frontend.commands.machine.planned.units import rate, size
from coppice.frontend.commands.options import Subparsers
from coppice.frontend.python.foreign_options import same_value
from coppice.runtime.config import EngineConfig

_DEMO = "demo"


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice plan`."""
    parser = commands.add_parser(
        "plan",
        help="show what a model takes and how much fits, from its config.json alone",
        description="Computes the memory of weights and KV, the sequences that fit with and "
        "without sharing, and the rate at which decoding can go at most. Reads no weights.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder, a GGUF file, a config.json, a hub id, or `demo`",
    )
    group = parser.add_argument_group("device")
    group.add_argument(
        "--device-memory", type=size, metavar="SIZE", help="of the device, such as 80GiB"
    )
    group.add_argument(
        "--kv-cache-memory-fraction",
        type=float,
        default=0.9,
        metavar="X",
        help="the KV cache's part of what the weights leave (default: 0.9)",
    )
    group.add_argument(
        "--kv-cache-memory", type=size, metavar="SIZE", help="of the KV cache, instead of that part"
    )
    group.add_argument(
        "--memory-bandwidth",
        type=size,
        metavar="SIZE",
        help="bytes that the device reads in a second, such as 3.35TB/s",
    )
    group.add_argument(
        "--product-rate",
        type=rate,
        metavar="RATE",
        help="of its products in 16 bits, such as 990TFLOP/s: with memory and bandwidth it gives "
        "the sequences and tokens of a step on a GPU",
    )
    group = parser.add_argument_group("load")
    group.add_argument(
        "--users", type=int, default=64, metavar="N", help="sequences at once (default: 64)"
    )
    group.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of each, prompt and output (default: 8192, or the longest there is)",
    )
    group.add_argument(
        "--shared", type=int, default=0, metavar="N", help="with which all begin (default: 0)"
    )
    group = parser.add_argument_group("engine")
    known = {option.name: option for option in fields(EngineConfig)}
    for name, help_text in (
        ("revision", known["revision"].metadata["help"]),
        ("dtype", "type of the weights: auto, float32, bfloat16, float16 (default: auto, the "
         "type that the config declares)"),
        ("kv_cache_dtype", "type of the KV: auto, float32, bfloat16, fp8 (default: auto, the "
         "weights' own)"),
        ("quantization", "weights of fewer bits: int8, int4 or fp8"),
        ("draft_model", "a model that proposes drafts: a folder or a hub id"),
    ):  # fmt: skip
        group.add_argument(
            *flags_of(name),
            type=partial(same_value, name),
            default=known[name].default,
            metavar="NAME",
            help=help_text,
        )
    for name, help_text in (
        ("tensor_parallel_size", "devices among which the model is divided (default: 1)"),
        ("page_size", "tokens of a page (default: 16)"),
        ("max_model_len", "tokens that are reserved where there are no pages (default: the "
         "longest that the model takes)"),
    ):  # fmt: skip
        group.add_argument(
            *flags_of(name), type=int, default=known[name].default, metavar="N", help=help_text
        )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_foreign_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises ValueError for a wrong argument."""
    from coppice.frontend.commands.machine.planned.encode import encode_plan
    from coppice.runtime.planning.plan import PlanOptions, make_plan
    from coppice.runtime.planning.source import find_config, read_model
    from coppice.runtime.planning.stored import read_stored

    options = PlanOptions(
        device_memory=arguments.device_memory,
        fraction=arguments.kv_cache_memory_fraction,
        kv_cache_memory=arguments.kv_cache_memory,
        memory_bandwidth=arguments.memory_bandwidth,
        product_rate=arguments.product_rate,
        users=arguments.users,
        context=arguments.context,
        shared=arguments.shared,
        max_model_len=arguments.max_model_len,
        tensor_parallel_size=arguments.tensor_parallel_size,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
        page_size=arguments.page_size,
    )
    source = arguments.model
    if source == _DEMO:
        from coppice.frontend.text.tokenizer import model_source

        source = model_source(source)
    folder = find_config(source, arguments.revision)
    model, draft = read_model(folder), None
    if arguments.draft_model is not None:
        try:
            draft = read_model(find_config(arguments.draft_model, None))
        except ValueError as error:
            raise ValueError(
                f"draft_model {arguments.draft_model!r} cannot be used: {error}"
            ) from error
    plan = make_plan(model, options, read_stored(folder), draft)
    if arguments.json:
        print(json.dumps(encode_plan(plan, arguments.model), indent=1))
        return 0
    from rich.console import Console

    from coppice.frontend.commands.machine.planned.table import show

    show(Console(highlight=False), plan, arguments.model)
    return 0

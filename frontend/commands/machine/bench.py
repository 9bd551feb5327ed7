"""`coppice bench`: measures a model on this machine, for `coppice simulate`."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from coppice.frontend.commands.foreign import add_foreign_options
from coppice.frontend.commands.options import (
    MODEL_HELP,
    Subparsers,
    add_engine_options,
    engine_options,
)


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice bench`."""
    parser = commands.add_parser(
        "bench",
        help="measure how long a model's steps take on this machine",
        description="Measures prompt tokens a second, and the time of decoding steps by the number "
        "of sequences, and writes them as a machine that `coppice simulate` reads.",
        allow_abbrev=False,
    )
    parser.shorten(
        "json prompt_tokens context_tokens max_batch rounds dtype quantization kv_cache_tokens "
        "max_num_seqs max_num_batched_tokens"
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    group = parser.add_argument_group("measurement")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the machine as JSON")
    group.add_argument(
        "--prompt-tokens",
        type=int,
        default=512,
        metavar="N",
        help="length of the prompt that is timed; it must fit one step (default: 512)",
    )
    group.add_argument(
        "--context-tokens",
        type=int,
        default=128,
        metavar="N",
        help="length of each sequence when decoding is timed (default: 128)",
    )
    group.add_argument(
        "--max-batch",
        type=int,
        default=16,
        metavar="N",
        help="most sequences that decode at once (default: 16)",
    )
    group.add_argument(
        "--rounds",
        type=int,
        default=10,
        metavar="N",
        help="how often each time is taken; the median counts (default: 10)",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)
    add_foreign_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises ValueError for a wrong argument."""
    from rich.console import Console
    from rich.text import Text

    from coppice.frontend.replay.run import check_files, write
    from coppice.frontend.simulate.bench import Measured, measure
    from coppice.frontend.simulate.machine import encode_machine
    from coppice.frontend.text.model.loading import load_around
    from coppice.runtime.config import EngineConfig
    from coppice.runtime.engine.core import Engine

    check_files(None, arguments.json, None)
    config = EngineConfig(model=arguments.model, **engine_options(arguments))
    loaded = load_around(config)
    # Nothing is reused: a prompt that hit would not be timed.
    engine = Engine(replace(loaded.config, enable_prefix_caching=False), **loaded.engine_arguments)
    console = Console(highlight=False)
    found = None
    with console.status("measuring") as status:
        for each in measure(
            engine,
            prompt_tokens=arguments.prompt_tokens,
            context_tokens=arguments.context_tokens,
            max_batch=arguments.max_batch,
            rounds=arguments.rounds,
        ):
            if isinstance(each, Measured):
                found = each
            else:
                status.update(f"measuring {each}")
    assert found is not None, "the last thing that is measured is the result"
    device = engine.runner.device.type
    console.print(Text(f"{arguments.model} on {device}", "bold"), soft_wrap=True)
    rate = found.prompt_tokens / found.prefill
    console.print(f"{rate:,.0f} prompt tokens a second, in a step of {found.prompt_tokens:,}")
    for size, seconds in found.decode.items():
        console.print(
            f"{1000 * seconds:8.2f} ms a step with {size:>3} decoding, "
            f"{size / seconds:,.0f} tokens a second"
        )
    if arguments.json is not None:
        about = {
            "model": arguments.model,
            "device": device,
            "cores": os.cpu_count(),
            "measured": {
                "prompt_tokens": found.prompt_tokens,
                "prompt_tokens_a_second": rate,
                "context_tokens": arguments.context_tokens,
                "rounds": arguments.rounds,
            },
        }
        write(arguments.json, json.dumps(encode_machine(found.machine, about), indent=1) + "\n")
        console.print(Text(f"JSON: {arguments.json}"), soft_wrap=True)
    return 0

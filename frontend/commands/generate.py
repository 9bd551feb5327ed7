"""`coppice generate`: continues prompts, or answers questions, and prints the texts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from coppice.frontend.commands.foreign import add_foreign_options
from coppice.frontend.commands.machine.launched import takes_part
from coppice.frontend.commands.options import (
    MODEL_HELP,
    Subparsers,
    adapter,
    add_adapter_option,
    add_engine_options,
    add_sampling_options,
    add_text_options,
    engine_options,
    sampling_fields,
    text_options,
)
from coppice.runtime.config import EngineConfig

if TYPE_CHECKING:
    from coppice.frontend.python.llm import LLM
    from coppice.frontend.text.outputs import RequestOutput


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice generate`."""
    parser = commands.add_parser(
        "generate", help="continue prompts, or answer questions", allow_abbrev=False
    )
    parser.shorten(
        "prompt prompts_file chat report temperature top_p max_tokens stop tokenizer dtype "
        "quantization kv_cache_tokens"
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt (may be repeated)"
    )
    source.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="a file with one prompt per line; empty lines are skipped; without --prompt and this, "
        "standard input is read in the same way",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="put each prompt as a user's question into the chat template",
    )
    parser.add_argument(
        "--report", action="store_true", help="print the prefix-hit report of the cache at the end"
    )
    add_sampling_options(parser)
    add_text_options(parser)
    add_engine_options(parser)
    add_adapter_option(parser)
    add_foreign_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Raises ValueError for a wrong argument."""
    prompts = _prompts(arguments)
    given, lora = sampling_fields(arguments), adapter(arguments)
    from coppice.frontend.python.llm import LLM
    from coppice.frontend.text.outputs import GenerationError

    if takes_part(EngineConfig(arguments.model, **engine_options(arguments))):
        return 0
    llm = LLM(arguments.model, **asdict(text_options(arguments)), **engine_options(arguments))
    params = replace(llm.get_default_sampling_params(), **given)
    failure = None
    try:
        if arguments.chat:
            turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(turns, params, lora_request=lora)
        else:
            outputs = llm.generate(prompts, params, lora_request=lora)
    except GenerationError as error:
        failure, outputs = error, error.outputs
    _print_outputs(prompts, outputs)
    if arguments.report:
        _print_report(llm)
    llm.shutdown()
    if failure is not None:
        print(f"coppice generate: {failure}", file=sys.stderr)
        return 1
    return 0


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
    """Prints the text of a single prompt alone; of several, each prompt above its text."""
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if len(prompts) > 1:
            print(f"[{index + 1}/{len(prompts)}] {prompt}")
        print(output.outputs[0].text)
        if len(prompts) > 1 and index + 1 < len(prompts):
            print()


def _print_report(llm: LLM) -> None:
    from rich.console import Console

    console = Console()
    console.print()
    console.print(llm.cache_report())

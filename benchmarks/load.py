"""Many streaming clients on one server for minutes, then the server beside the engine alone.

    python benchmarks/load.py [--quick] [--json FILE] [--model MODEL] [--clients N] [--seconds S]

Each client sends one request after another on one connection. A prompt is one of a few shared
documents and tokens of its own; the answer has 0.5 to 1.5 times `--out` tokens and is streamed; one
request in a hundred is aborted midway. The row reports errors, memory, lost pages and latencies.

Then the server takes turns with the bare engine: the same mix and as many requests at once, without
server, processes and text. A machine's speed changes within seconds by more than the two differ. So
both processes stay alive, and one of them is always stopped, for a second each. The clients share
the cores with the server, which costs throughput. So in a third kind of turn the bare engine runs
beside a process that uses as much processor time for each token as the clients do. The row has the
ratio to both kinds, and the processor time of each process.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.harness import Rows, machine, parser, spread
from server.bare import Bare
from server.clients import Mix, Tally, client
from server.watched import Watched

TURNS = ("bare", "served", "bare beside clients")
TURN_SECONDS = 1.0


def start_server(args: Any) -> tuple[subprocess.Popen[str], tuple[str, int]]:
    command = [Path(sys.executable).parent / "coppice", "serve", args.model, "--port", "0"]
    command += ["--kv-cache-tokens", str(args.pool), "--max-num-seqs", str(args.clients)]
    log = Path(args.log).open("w")  # noqa: SIM115  (open as long as the server runs)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("url"):
            host, port = line.split("//")[1].strip().rsplit(":", 1)
            return server, (host, int(port))
    raise RuntimeError(f"the server did not start; see {args.log}")


async def crowd(
    args: Any, address: tuple[str, int], mix: Mix, tally: Tally, warm: float, seconds: float
) -> AsyncIterator[float]:
    """Runs the clients; yields 0.0 each second after the warm-up, at last the tokens a second."""
    end = time.monotonic() + warm + seconds
    tasks = [
        asyncio.create_task(client(address, args.model, mix, end, random.Random(seed), tally))
        for seed in range(args.clients)
    ]
    await asyncio.sleep(warm)
    tokens, since = tally.tokens, time.monotonic()
    while time.monotonic() < end:
        yield 0.0
        await asyncio.sleep(min(1.0, seconds / 20))
    yield (tally.tokens - tokens) / (time.monotonic() - since)
    await asyncio.gather(*tasks)


async def serve(args: Any, mix: Mix) -> dict[str, Any]:
    """Runs the server under load, then the turns; returns what the row is made of."""
    server, address = await asyncio.to_thread(start_server, args)
    try:
        api = Watched(server.pid)
        (engine_pid,) = [
            pid
            for pid in api.children()
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        engine, own = Watched(engine_pid), Watched(os.getpid())
        processes = {"server": api, "engine": engine, "clients": own}
        tally, rate, before, since = Tally(), 0.0, {}, 0.0
        memory: dict[str, list[int]] = {"server": [], "engine": []}
        async for latest in crowd(
            args, address, mix, tally, args.seconds / 5, args.seconds * 4 / 5
        ):
            rate = latest
            if not before:
                since = time.monotonic()
                before = {name: process.seconds() for name, process in processes.items()}
            for name, values in memory.items():
                values.append(processes[name].resident())
            cores = {
                name: (process.seconds() - before[name]) / (time.monotonic() - since)
                for name, process in processes.items()
            }
        report = await asyncio.to_thread(report_when_idle, address)
        turns = await take_turns(args, address, mix, [server.pid, engine_pid])
    finally:
        server.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(server.wait, 60)
    return {
        "tally": tally,
        "rate": rate,
        "used": cores,
        "memory": memory,
        "report": report,
        "status": status,
        "turns": turns,
    }


@dataclass
class Round:
    """Tokens and seconds of each kind of turn, summed over the turns of a round."""

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TURNS, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TURNS, 0.0))
    errors: int = 0

    def rate(self, kind: str) -> float:
        return self.tokens[kind] / self.seconds[kind]

    def ratio(self, kind: str) -> float:
        return self.rate("served") / self.rate(kind)


async def take_turns(
    args: Any, address: tuple[str, int], mix: Mix, server: list[int]
) -> list[Round]:
    """Runs the processes of `server` and the bare engine in turn; the other one is stopped.

    The clients draw new prompts, since those of the first part are cached.
    """
    tally, own = Tally(), Watched(os.getpid())
    bare = await asyncio.to_thread(Bare, args)
    signal_all(bare.pids, signal.SIGSTOP)
    seeds = range(args.clients, 2 * args.clients)
    clients = [
        asyncio.create_task(client(address, args.model, mix, math.inf, random.Random(seed), tally))
        for seed in seeds
    ]
    # Processor seconds of the clients: for each token in the last round, and in all in this one.
    rounds, price, spent = [], 0.0, 0.0
    try:
        await asyncio.sleep(args.window / 3)
        signal_all(server, signal.SIGSTOP)
        signal_all(bare.pids, signal.SIGCONT)
        await asyncio.sleep(args.window / 3)
        signal_all(bare.pids, signal.SIGSTOP)
        for _ in range(args.rounds + 1):  # the first one only measures what the clients cost
            this, errors, spent = Round(), len(tally.errors), 0.0
            while this.seconds["served"] < args.window:
                for kind in TURNS:
                    pids = server if kind == "served" else bare.pids
                    tokens, seconds = (
                        tally.tokens if kind == "served" else bare.tokens,
                        own.seconds(),
                    )
                    begun = time.monotonic()
                    signal_all(pids, signal.SIGCONT)
                    if kind == "bare beside clients":
                        await spend(price, bare, TURN_SECONDS)
                    else:
                        await asyncio.sleep(TURN_SECONDS)
                    signal_all(pids, signal.SIGSTOP)
                    this.seconds[kind] += time.monotonic() - begun
                    now = tally.tokens if kind == "served" else bare.tokens
                    this.tokens[kind] += now - tokens
                    if kind == "served":
                        spent += own.seconds() - seconds
            this.errors = len(tally.errors) - errors
            rounds.append(this)
            price = spent / max(1, this.tokens["served"])
    finally:
        signal_all([*server, *bare.pids], signal.SIGCONT)
        await asyncio.to_thread(bare.close)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return rounds[1:]


async def spend(price: float, bare: Bare, seconds: float) -> None:
    """Uses `price` seconds of processor time for each token that the bare engine generates."""
    end, first, begun = time.monotonic() + seconds, bare.tokens, time.process_time()
    while time.monotonic() < end:
        await asyncio.sleep(0.02)
        while time.monotonic() < end and time.process_time() - begun < price * (
            bare.tokens - first
        ):
            sum(range(1000))


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def report_when_idle(address: tuple[str, int]) -> dict[str, Any]:
    url = f"http://{address[0]}:{address[1]}/cache/report"
    for _ in range(100):
        with urllib.request.urlopen(url, timeout=30) as response:
            report: dict[str, Any] = json.load(response)
        if not report["pool"]["pages"]["held"]:
            break
        time.sleep(0.1)
    return report


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        name: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 4)
        for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="demo")
    options.add_argument("--clients", type=int)
    options.add_argument("--seconds", type=float, help="how long the load lasts")
    options.add_argument("--shared", type=int, default=512, help="tokens of a shared document")
    options.add_argument("--own", type=int, default=32, help="own tokens of each prompt")
    options.add_argument("--out", type=int, default=32, help="mean number of tokens generated")
    options.add_argument("--pool", type=int, default=65_536, help="tokens in the KV cache")
    options.add_argument("--log", default=os.devnull, help="file for the server's log")
    options.add_argument(
        "--rounds", type=int, default=6, help="rounds of server and bare engine in turn"
    )
    options.add_argument("--window", type=float, help="seconds of each kind of turn in a round")
    args = options.parse_args()
    args.clients = args.clients or (16 if args.quick else 256)
    args.seconds = args.seconds or (20 if args.quick else 300)
    args.window = args.window or (5 if args.quick else 15)
    from transformers import AutoConfig

    from coppice.frontend.text.tokenizer import model_source

    vocabulary = AutoConfig.from_pretrained(model_source(args.model)).vocab_size
    mix = Mix(vocabulary, args.shared, args.own, args.out)
    rows = Rows(args.json)
    result = asyncio.run(serve(args, mix))
    tally: Tally = result["tally"]
    for error in tally.errors[:5]:
        print(error, file=sys.stderr)
    turns: list[Round] = result["turns"]
    pages = result["report"]["pool"]["pages"]
    rows.add(
        benchmark="load",
        model=args.model,
        **{name: getattr(args, name) for name in ("clients", "seconds", "shared", "own", "out")},
        answers=tally.answers,
        left_early=tally.left,
        errors=len(tally.errors) + sum(each.errors for each in turns),
        exit_status=result["status"],
        pages_held_at_the_end=pages["held"],
        pages_lost=2 * pages["total"] - sum(pages.values()),
        resident_last_over_first_quarter={
            name: round(mean(values[-len(values) // 4 :]) / mean(values[: len(values) // 4]), 3)
            for name, values in result["memory"].items()
        },
        throughput_over_bare_engine=spread([each.ratio("bare") for each in turns]),
        throughput_over_bare_engine_beside_clients=spread(
            [each.ratio("bare beside clients") for each in turns]
        ),
        cores_used={name: round(value, 2) for name, value in result["used"].items()},
        itl_p99_over_p50=round(quantiles(tally.gaps)["p99"] / quantiles(tally.gaps)["p50"], 2),
        times={
            "ttft_s": quantiles(tally.ttft),
            "itl_s": quantiles(tally.gaps),
            "tokens_per_s": round(result["rate"]),
            "turns_tokens_per_s": {
                kind: [round(each.rate(kind)) for each in turns] for kind in TURNS
            },
        },
        machine=machine(),
    )


def mean(values: list[int]) -> float:
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    main()

"""Many streaming clients on one server, for minutes; then beside the bare engine.

    python benchmarks/load.py [--quick] [--json FILE] [--model MODEL] [--clients N] [--seconds S]

Each client asks over and over: one of a few shared documents, a part of its own, tokens out between
half and one and a half times `--out`, streamed; one request in a hundred is left in the middle. The
row tells of errors, memory, lost pages and latencies. After that the server and the bare engine,
without server, processes and text, take turns at the same mix with as many requests at once, a
window each, since the machine's mood changes more between two minutes than the two differ. The
clients run on the same cores as the server: the processor time of each process is in the row, since
the throughput pays for all three.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import Rows, machine, parser, spread

DOCUMENTS = 4
LEFT_EARLY = 0.01
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Tally:
    """What the clients saw."""

    answers: int = 0
    left: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between two pieces of one stream


class Mix:
    """The prompts: shared documents, each continued by tokens of the request's own."""

    def __init__(self, vocabulary: int, shared: int, own: int, out: int) -> None:
        rng = random.Random(0)
        self._tokens = range(vocabulary // 8, vocabulary)  # no special tokens
        self._documents = [rng.choices(self._tokens, k=shared) for _ in range(DOCUMENTS)]
        self._written = [", ".join(map(str, document)) for document in self._documents]
        self._own = own
        self._out = out

    def length(self, rng: random.Random) -> int:
        """Tokens to generate. They vary, else requests that began together end together for ever,
        and are prefilled in one step, which no server would see."""
        return rng.randint(max(1, self._out // 2), self._out + self._out // 2)

    def prompt(self, rng: random.Random) -> list[int]:
        return rng.choice(self._documents) + rng.choices(self._tokens, k=self._own)

    def prompt_json(self, rng: random.Random) -> str:
        """One as JSON, the document's written once for all."""
        own = rng.choices(self._tokens, k=self._own)
        return f"[{rng.choice(self._written)}, {', '.join(map(str, own))}]"


class Asking(asyncio.Protocol):
    """One request. A bare protocol, since the cores are to serve and not to be a client."""

    def __init__(self, raw: bytes, leaves: bool, tally: Tally) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self._raw, self._leaves, self._tally = raw, leaves, tally
        self._begun = time.monotonic()
        self._last: float | None = None
        self._head, self._tail = b"", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._raw)

    def data_received(self, piece: bytes) -> None:
        now = time.monotonic()
        self._head = self._head or piece
        self._tail = (self._tail + piece)[-2000:]
        if b'"text"' in piece:
            if self._last is None:
                self._tally.ttft.append(now - self._begun)
            else:
                self._tally.gaps.append(now - self._last)
            self._last = now
            if self._leaves:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        used = re.search(rb'"completion_tokens":\s*(\d+)', self._tail)
        if self._leaves and self._last is not None:
            self._tally.left += 1
        elif error is not None:
            self._tally.errors.append(repr(error))
        elif b" 200 " not in self._head[:20] or b"data: [DONE]" not in self._tail or used is None:
            self._tally.errors.append((self._head + self._tail).decode(errors="replace")[-300:])
        else:
            self._tally.answers += 1
            self._tally.tokens += int(used.group(1))
        self.over.set_result(None)


async def client(
    address: tuple[str, int], model: str, mix: Mix, end: float, rng: random.Random, tally: Tally
) -> None:
    """Asks until `end`."""
    loop = asyncio.get_running_loop()
    while time.monotonic() < end:
        body = {
            "model": model,
            "max_tokens": mix.length(rng),
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        raw = f'{json.dumps(body)[:-1]}, "prompt": {mix.prompt_json(rng)}}}'.encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
        raw = head.encode() + b"Connection: close\r\n\r\n" + raw
        make = partial(Asking, raw, rng.random() < LEFT_EARLY, tally)
        try:
            _, asking = await loop.create_connection(make, *address)
        except OSError as error:
            tally.errors.append(repr(error))
        else:
            await asking.over


class Watched:
    """Memory and processor time of a process, from /proc."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def resident(self) -> int:
        """Bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096

    def seconds(self) -> float:
        parts = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(parts[11]) + int(parts[12])) / TICK

    def children(self) -> list[int]:
        lists = Path(f"/proc/{self.pid}/task").glob("*/children")  # of each thread
        return [int(pid) for path in lists for pid in path.read_text().split()]


class Bare:
    """The engine alone, in a process of its own that lives from window to window."""

    def __init__(self, args: Any) -> None:
        command = [sys.executable, __file__, "--bare"]
        for name in ("model", "clients", "shared", "own", "out", "pool"):
            command += [f"--{name}", str(getattr(args, name))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def rate(self, warm: float, seconds: float) -> float:
        """Tokens a second, counted for so long after warming up."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(warm, seconds, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def run_bare(args: Any) -> None:
    """Answers each line of warm-up and seconds with the tokens a second of a window."""
    from coppice import EngineConfig
    from coppice.frontend.text_engine import TextEngine

    config = EngineConfig(
        model=args.model,
        kv_cache_tokens=args.pool,
        max_num_seqs=args.clients,
        overtaking=0.15,
        max_step_stretch=2.5,
    )
    engine = TextEngine.load(config).engine
    mix = Mix(engine.model_config.vocab_size, args.shared, args.own, args.out)
    rng = random.Random(-1)
    for line in sys.stdin:
        warm, seconds = map(float, line.split())
        print(bare_window(engine, mix, rng, args.clients, warm, seconds), flush=True)


def bare_window(
    engine: Any, mix: Mix, rng: random.Random, clients: int, warm: float, seconds: float
) -> float:
    from coppice import SamplingParams

    added = generated = 0
    begun = time.monotonic()
    counted_from = None
    running: set[str] = set()
    while (now := time.monotonic()) < begun + warm + seconds:
        if counted_from is None and now >= begun + warm:
            counted_from, generated = now, 0
        while len(running) < clients:
            running.add(str(added))
            params = SamplingParams(temperature=0, max_tokens=mix.length(rng), ignore_eos=True)
            engine.add_request(str(added), mix.prompt(rng), params)
            added += 1
        for output in engine.step():
            generated += len(output.new_token_ids)
            if output.finish_reason is not None:
                running.discard(output.request_id)
    assert counted_from is not None
    rate = generated / (time.monotonic() - counted_from)
    for name in running:
        engine.abort(name)
    return rate


def start_server(args: Any) -> tuple[subprocess.Popen[str], tuple[str, int]]:
    command = [Path(sys.executable).parent / "coppice", "serve", args.model, "--port", "0"]
    command += ["--kv-cache-tokens", str(args.pool), "--max-num-seqs", str(args.clients)]
    log = Path(args.log).open("w")  # noqa: SIM115  (the server's as long as it lives)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("url"):
            host, port = line.split("//")[1].strip().rsplit(":", 1)
            return server, (host, int(port))
    raise RuntimeError(f"the server did not start; see {args.log}")


async def crowd(
    args: Any,
    address: tuple[str, int],
    mix: Mix,
    tally: Tally,
    warm: float,
    seconds: float,
    turn: int = 0,
) -> AsyncIterator[float]:
    """Runs the clients; yields each second of what counts, and at last the tokens a second.

    Each turn asks something new: what was asked before would be cached.
    """
    end = time.monotonic() + warm + seconds
    tasks = [
        asyncio.create_task(client(address, args.model, mix, end, random.Random(seed), tally))
        for seed in range(turn * args.clients, (turn + 1) * args.clients)
    ]
    await asyncio.sleep(warm)
    tokens, since = tally.tokens, time.monotonic()
    while time.monotonic() < end:
        yield 0.0
        await asyncio.sleep(min(1.0, seconds / 20))
    yield (tally.tokens - tokens) / (time.monotonic() - since)
    await asyncio.gather(*tasks)


async def serve(args: Any, mix: Mix) -> dict[str, Any]:
    """The server under load; what the clients saw, memory, processor time, pages at the end."""
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
        turns = await take_turns(args, address, mix)
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


async def take_turns(
    args: Any, address: tuple[str, int], mix: Mix
) -> list[tuple[float, float, int]]:
    """Of each round: tokens a second of the server and of the bare engine, errors of the server."""
    bare = await asyncio.to_thread(Bare, args)
    try:
        turns = []
        for turn in range(1, args.rounds + 1):
            alone = await asyncio.to_thread(bare.rate, args.window / 3, args.window)
            tally, rate = Tally(), 0.0
            async for latest in crowd(
                args, address, mix, tally, args.window / 3, args.window, turn
            ):
                rate = latest
            turns.append((rate, alone, len(tally.errors)))
    finally:
        await asyncio.to_thread(bare.close)
    return turns


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
    options.add_argument("--seconds", type=float, help="of load on the server")
    options.add_argument("--shared", type=int, default=512, help="tokens of a shared document")
    options.add_argument("--own", type=int, default=32, help="tokens of its own of each prompt")
    options.add_argument("--out", type=int, default=32, help="tokens out, on average")
    options.add_argument("--pool", type=int, default=65_536, help="tokens in the KV cache")
    options.add_argument("--log", default=os.devnull, help="where the server's log goes")
    options.add_argument("--rounds", type=int, default=6, help="of server and bare engine in turn")
    options.add_argument("--window", type=float, help="seconds counted of each turn")
    options.add_argument("--bare", action="store_true", help="(is the bare engine)")
    args = options.parse_args()
    args.clients = args.clients or (16 if args.quick else 256)
    args.seconds = args.seconds or (20 if args.quick else 300)
    args.window = args.window or (5 if args.quick else 20)
    if args.bare:
        run_bare(args)
        return
    from transformers import AutoConfig

    from coppice.frontend.tokenizer import model_source

    vocabulary = AutoConfig.from_pretrained(model_source(args.model)).vocab_size
    mix = Mix(vocabulary, args.shared, args.own, args.out)
    rows = Rows(args.json)
    result = asyncio.run(serve(args, mix))
    tally: Tally = result["tally"]
    for error in tally.errors[:5]:
        print(error, file=sys.stderr)
    pages = result["report"]["pool"]["pages"]
    rows.add(
        benchmark="load",
        model=args.model,
        **{name: getattr(args, name) for name in ("clients", "seconds", "shared", "own", "out")},
        answers=tally.answers,
        left_early=tally.left,
        errors=len(tally.errors) + sum(errors for _, _, errors in result["turns"]),
        exit_status=result["status"],
        pages_held_at_the_end=pages["held"],
        pages_lost=2 * pages["total"] - sum(pages.values()),
        resident_last_over_first_quarter={
            name: round(mean(values[-len(values) // 4 :]) / mean(values[: len(values) // 4]), 3)
            for name, values in result["memory"].items()
        },
        throughput_over_bare_engine=spread([mine / bare for mine, bare, _ in result["turns"]]),
        cores_used={name: round(value, 2) for name, value in result["used"].items()},
        itl_p99_over_p50=round(quantiles(tally.gaps)["p99"] / quantiles(tally.gaps)["p50"], 2),
        times={
            "ttft_s": quantiles(tally.ttft),
            "itl_s": quantiles(tally.gaps),
            "tokens_per_s": round(result["rate"]),
            "turns_tokens_per_s": [round(mine) for mine, _, _ in result["turns"]],
            "turns_bare_tokens_per_s": [round(bare) for _, bare, _ in result["turns"]],
        },
        machine=machine(),
    )


def mean(values: list[int]) -> float:
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    main()

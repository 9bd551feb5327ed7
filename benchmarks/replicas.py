"""Replicas and their ingress on this machine, in turn with what they are to be compared with.

    python benchmarks/replicas.py [--quick] [--model MODEL] [--rounds N] [--json FILE]
        [--rates R ...] [--no-ingress] [--no-rules]

1. `ingress`: `coppice serve --replicas 1` on Ray Serve beside plain `coppice serve`, with as many
   threads: output tokens a second of 16 streams at once, and the time to the first token of one
   request alone. Both servers stay alive and take turns; the one that waits does nothing. Prompts
   are new in each round, the same for both.

2. `rules`: two replicas, each with one thread, behind our router, and behind the rules of Ray's
   default router (the better of two by requests) and of its prefix router, as `routing/policies.py`
   has them. Hubs with each rule are connected to the same two engines, take turns, and empty the
   caches before each. Requests come at random times: a document of 600 tokens of 24, some asked for
   much more often than others, and 40 tokens of their own. A cache holds half of them. The
   row has prompt tokens that were computed, and the 50th and 99th percentile of the time to the
   first token, over those of our router in the same round.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from common.harness import Rows, parser, processor, spread
from coppice.frontend.client.process import EngineProcess
from coppice.frontend.router.choosing.policy import Choice, Router
from coppice.frontend.router.client import ReplicasClient
from coppice.frontend.router.hub import Hub
from coppice.frontend.text.model.loading import load_around
from coppice.radix.tokens import Tokens, token_bytes
from coppice.runtime.config import EngineConfig
from coppice.runtime.process.messages import Ready
from coppice.runtime.requests.sampling_params import SamplingParams
from routing.policies import Counting, PowerOfTwo, RayPrefix
from routing.workloads import Work

_AT_ONCE, _OUT = 16, 48


# -- 1. the ingress ----------------------------------------------------------------------------


class Server:
    """A server in processes of its own."""

    def __init__(self, model: str, log: Path, *options: str) -> None:
        command = [str(Path(sys.executable).parent / "coppice"), "serve", model, "--port", "0"]
        command += ["--kv-cache-tokens", "65536", "--log-level", "warning", *options]
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True
            )
        self.url = ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("url"):
                self.url = line.split()[1]
            if line.startswith("report"):
                break
        if not self.url:
            raise RuntimeError(f"the server did not start; see {log}")

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=120)


async def answer(
    session: aiohttp.ClientSession, server: Server, prompt: Sequence[int]
) -> tuple[float, int]:
    """Seconds to the first piece of a stream, and its tokens."""
    body = {"prompt": prompt, "max_tokens": _OUT, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    begun, first, tokens = time.perf_counter(), 0.0, 0
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begun
                if b"completion_tokens" in line:
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return first, tokens


async def turn(server: Server, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Output tokens a second of all prompts, 16 at once, and seconds to the first of one alone."""
    room = asyncio.Semaphore(_AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: Sequence[int]) -> tuple[float, int]:
            async with room:
                return await answer(session, server, prompt)

        begun = time.perf_counter()
        found = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.perf_counter() - begun
        alone = [(await answer(session, server, prompts[0]))[0] for _ in range(15)]
    return {
        "tokens": sum(tokens for _, tokens in found) / seconds,
        "first": statistics.median(first for first, _ in found),
        "alone": statistics.median(alone),
    }


def ingress(args: Any, rows: Rows) -> None:
    """Part 1."""
    folder = Path(tempfile.mkdtemp(prefix="coppice-replicas-"))
    cores = os.cpu_count() or 1
    plain = Server(args.model, folder / "plain.log")
    behind = Server(
        args.model, folder / "ingress.log", "--replicas", "1", "--replica-cpus", str(cores)
    )
    rng, found = random.Random(1), {"plain": [], "ingress": []}  # type: ignore[var-annotated]
    try:
        for number in range(args.rounds + 1):
            shared = [[rng.randrange(1000) for _ in range(256)] for _ in range(4)]
            prompts = [
                rng.choice(shared) + [rng.randrange(1000) for _ in range(32)]
                for _ in range(args.requests)
            ]
            order = [("plain", plain), ("ingress", behind)]
            for name, server in order if number % 2 else order[::-1]:
                result = asyncio.run(turn(server, prompts))
                if number:  # the first round warms up
                    found[name].append(result)
    finally:
        plain.close()
        behind.close()
    pairs = list(zip(found["ingress"], found["plain"], strict=True))
    rows.add(
        case="ingress",
        model=args.model,
        **processor(),
        throughput=spread([one["tokens"] / other["tokens"] for one, other in pairs]),
        first_token_under_load=spread([one["first"] / other["first"] for one, other in pairs]),
        added_milliseconds_alone=spread(
            [1e3 * (one["alone"] - other["alone"]) for one, other in pairs]
        ),
    )


# -- 2. the rules ------------------------------------------------------------------------------


class Ruled(Router):
    """A router that another rule decides for."""

    def __init__(self, rule: Counting) -> None:
        super().__init__()
        self._rule = rule
        self._count = 0
        self._names: dict[str, str] = {}  # of the rule, by request

    def choose(
        self,
        tokens: Tokens,
        namespace: Hashable = None,
        *,
        priority: int = 0,
        without: Collection[int] = (),
    ) -> Choice | None:
        found = super().choose(tokens, namespace, priority=priority, without=without)
        if found is None:
            return None
        self._count += 1
        place = self._rule.choose(str(self._count), Work(0.0, (token_bytes(tokens),), 0, 0), 0.0)
        return Choice(place, found.hit if place == found.replica else 0, 0.0, found.elsewhere)

    def send(self, request: str, choice: Choice, *args: Any, **more: Any) -> None:
        super().send(request, choice, *args, **more)
        self._names[request] = str(self._count)

    def end(self, request: str) -> None:
        super().end(request)
        name = self._names.pop(request, None)
        if name is not None:
            self._rule.ended(name, 0.0)


def requests(rng: random.Random, count: int, rate: float) -> list[tuple[float, list[int]]]:
    """When each prompt comes, in seconds, and its tokens."""
    documents = [[rng.randrange(1000) for _ in range(600)] for _ in range(24)]
    weights = [1 / (place + 1) for place in range(len(documents))]
    now, found = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        (document,) = rng.choices(documents, weights)
        found.append((now, document + [rng.randrange(1000) for _ in range(40)]))
    return found


async def play(
    client: ReplicasClient, arrivals: Sequence[tuple[float, list[int]]]
) -> dict[str, float]:
    """Runs the requests; tokens that were computed, and percentiles of the first token's time."""
    await client.ask("reset_cache")
    before = await client.ask("stats")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    begun = time.perf_counter()

    async def one(at: float, prompt: list[int]) -> float:
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        asked = time.perf_counter()
        first = 0.0
        async with await client.submit([(None, prompt)], params) as deltas:
            async for _ in deltas:
                first = first or time.perf_counter() - asked
        return first

    times = sorted(await asyncio.gather(*(one(at, prompt) for at, prompt in arrivals)))
    after = await client.ask("stats")
    computed = (after.prompt_tokens - before.prompt_tokens) - (after.hit_tokens - before.hit_tokens)
    return {"computed": computed, "p50": times[len(times) // 2], "p99": times[-len(times) // 100]}


async def rules(args: Any, rows: Rows, rate: float) -> None:
    """Part 2."""
    config = EngineConfig(args.model, kv_cache_tokens=8192, max_num_seqs=16)
    loaded = load_around(config, without_torch=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    engines = [
        EngineProcess(loaded.config, host="127.0.0.1", **loaded.engine_arguments) for _ in range(2)
    ]
    doors = []
    for engine in engines:
        (ready,) = engine.channels()[0].receive()
        assert isinstance(ready, Ready)
        doors.append(ready.door)
    makers = {
        "ours": Router,
        "the better of two": lambda: Ruled(PowerOfTwo(2, random.Random(1))),
        "Ray's prefix rule": lambda: Ruled(RayPrefix(2, random.Random(1), 8192 // 64)),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in makers}
    try:
        for number in range(args.rounds + 1):
            arrivals = requests(random.Random(number), 2 * args.requests, rate)
            names = list(makers)
            random.Random(number).shuffle(names)
            for name in names:
                hub = Hub(router=makers[name]())
                for place, door in enumerate(doors):
                    await asyncio.to_thread(partial(hub.join, f"r{place}", "127.0.0.1", door))
                client = ReplicasClient(hub, loaded.tokenizer, loaded.defaults)
                await client.start()
                result = await play(client, arrivals)
                await client.stop()
                if number:
                    found[name].append(result)
    finally:
        for engine in engines:
            engine.kill()
    ours = found.pop("ours")
    for name, results in found.items():
        pairs = list(zip(results, ours, strict=True))
        rows.add(
            case="rules",
            rule=name,
            model=args.model,
            rate=rate,
            **processor(),
            **{key: spread([one[key] / other[key] for one, other in pairs]) for key in ours[0]},
        )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="demo")
    arguments.add_argument("--rounds", type=int, default=8)
    arguments.add_argument("--requests", type=int, default=192)
    arguments.add_argument(
        "--rates", type=float, nargs="+", default=[60.0, 120.0], help="requests a second, part 2"
    )
    arguments.add_argument("--no-rules", action="store_true")
    arguments.add_argument("--no-ingress", action="store_true")
    args = arguments.parse_args()
    if args.quick:
        args.rounds, args.requests, args.rates = 2, 32, args.rates[:1]
    rows = Rows(args.json)
    if not args.no_ingress:
        ingress(args, rows)
    for rate in () if args.no_rules else args.rates:
        asyncio.run(rules(args, rows, rate))


if __name__ == "__main__":
    main()

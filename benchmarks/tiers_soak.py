"""Whether memory and open files stay bounded while an engine with tiers serves for a long time.

    python benchmarks/tiers_soak.py [--minutes 60] [--redis redis://127.0.0.1:PORT] [--json FILE]

A small model of random weights serves conversations that go on, start anew and share beginnings,
from a cache that holds a few of them, with main memory and a folder as tiers that are too small for
all: pages are evicted, written, dropped, loaded and computed again all the time. From time to time
nothing is asked, or the engine sleeps. One engine serves for the first two thirds of the time; in
the last third engines end, each after a minute or two, and another one opens the folder: a restart.

A row for each minute: resident memory, open files, threads, requests, tokens from tiers. The last
row: how much memory grew in the one engine, from the second quarter of its life to the last one,
and what that is in an hour; how high it came with restarts, beside the one engine; the most open
files and threads of both parts.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common.harness import Rows, machine, parser
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.sampling_params import SamplingParams

_VOCABULARY = 32_000
_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_AT_ONCE = 8  # requests
_LONGEST = 2000  # tokens of a conversation
_ONE_ENGINE = 2 / 3  # of the time before the first restart


class Conversations:
    """Prompts: most go on with what was said, some begin, and beginnings are often the same."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._stems = [self._tokens(rng.randint(50, 400)) for _ in range(20)]
        self._open: list[list[int]] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, _VOCABULARY) for _ in range(count)]

    def next(self) -> list[int]:
        rng = self._rng
        if self._open and rng.random() < 0.7:
            prompt = self._open.pop(rng.randrange(len(self._open)))
        else:
            prompt = list(rng.choice(self._stems))
        return prompt + self._tokens(rng.randint(5, 100))

    def said(self, prompt: list[int], answer: list[int]) -> None:
        if len(prompt) < _LONGEST:
            self._open.append(prompt + answer)
        if len(self._open) > 200:
            del self._open[self._rng.randrange(len(self._open))]


def resident() -> int:
    """Bytes of this process's memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def row(begun: float, requests: int, restarts: int, tokens: dict[str, int]) -> dict[str, Any]:
    return {
        "minutes": round((time.monotonic() - begun) / 60, 2),
        "resident_mb": round(resident() / 1e6, 1),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "requests": requests,
        "restarts": restarts,
        **tokens,
    }


def opened(model: Path, folder: Path, redis: str | None) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model), load_format="dummy", kv_cache_tokens=4096, page_size=16,
            max_num_seqs=_AT_ONCE, max_num_batched_tokens=512, host_cache="8MiB",
            disk_cache=str(folder), disk_cache_size="64MiB", shared_cache=redis,
        )
    )  # fmt: skip


def soak(minutes: float, redis: str | None, rows: Rows) -> None:
    rng = random.Random(1)
    talks, begun = Conversations(rng), time.monotonic()
    seen: list[dict[str, Any]] = []
    requests = restarts = 0
    before: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place:
        model, folder = Path(place) / "model", Path(place) / "cache"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        made = opened(model, folder, redis)
        asked: dict[str, list[int]] = {}
        answers: dict[str, list[int]] = {}
        while time.monotonic() - begun < 60 * minutes:
            while made.num_unfinished < _AT_ONCE:
                name, prompt = str(requests), talks.next()
                requests += 1
                asked[name], answers[name] = prompt, []
                params = SamplingParams(max_tokens=rng.randint(1, 24), temperature=1, seed=requests)
                made.add_request(name, prompt, params, cache_salt=rng.choice([None, None, "a"]))
            for output in made.step():
                answers[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    talks.said(asked.pop(output.request_id), answers.pop(output.request_id))
            chance = rng.random()
            if chance < 0.001:  # all is quiet for a second, or the engine ends
                while made.has_unfinished():
                    made.step()
                asked.clear()
                answers.clear()
                quiet = time.monotonic() + 1
                while (pause := made.between()) is not None and time.monotonic() < quiet:
                    time.sleep(pause)
                if chance < 0.0003:
                    made.sleep(1)
                    made.wake_up()
                elif chance < 0.0006 and time.monotonic() - begun > 60 * minutes * _ONE_ENGINE:
                    before = tokens_of(made, before)
                    made.close()
                    made = opened(model, folder, redis)
                    restarts += 1
            if time.monotonic() - begun >= 60 * len(seen):
                seen.append(row(begun, requests, restarts, tokens_of(made, before)))
                rows.add(case="minute", **seen[-1])
        seen.append(row(begun, requests, restarts, tokens_of(made, before)))
        made.close()
    rows.add(case="soak", **summary(seen), machine=machine())


def tokens_of(made: Engine, before: dict[str, int]) -> dict[str, int]:
    """Tokens from each tier since the start, with those of engines that have ended."""
    assert made.tiers is not None
    found = dict(before)
    for each in made.tiers.report().stores:
        for kind in ("loaded_tokens", "warmed_tokens", "written_pages", "failures", "damaged"):
            name = f"{each.name}_{kind}"
            found[name] = before.get(name, 0) + getattr(each, kind)
    return found


def summary(seen: list[dict[str, Any]]) -> dict[str, Any]:
    one = [each for each in seen if each["restarts"] == 0] or seen
    quarter = max(1, len(one) // 4)
    second, last = one[quarter : 2 * quarter] or one, one[-quarter:]
    memory = [statistics.median(each["resident_mb"] for each in part) for part in (second, last)]
    hours = (last[len(last) // 2]["minutes"] - second[len(second) // 2]["minutes"]) / 60
    parts = [one, seen[len(one) :] or one]
    return {
        **seen[-1],
        "memory_grew": round(memory[1] / memory[0], 4),
        "grows_mb_an_hour": round((memory[1] - memory[0]) / hours, 2) if hours else None,
        "most_mb_of_parts": [max(each["resident_mb"] for each in part) for part in parts],
        "files_of_parts": [max(each["files"] for each in part) for part in parts],
        "threads_of_parts": [max(each["threads"] for each in part) for part in parts],
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=60.0, help="how long it serves")
    made.add_argument("--redis", metavar="URL", help="a Redis server as a further tier")
    arguments = made.parse_args()
    minutes = min(arguments.minutes, 0.5) if arguments.quick else arguments.minutes
    soak(minutes, arguments.redis, Rows(arguments.json))


if __name__ == "__main__":
    main()

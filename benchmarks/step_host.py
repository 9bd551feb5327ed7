"""The processor time of a decoding step: what the engine does on the host when the model is free.

    python benchmarks/step_host.py [--quick] [--json FILE] [--rounds N]

The engine is the real one, with asynchronous scheduling and graphs: scheduling, batch, attention
plans in the shape of Qwen3-0.6B's heads, choice of tokens, commit. Forward passes are left out, and
so is what a GPU adds: launches, pinned memory, events. Rows give milliseconds a step for each batch
and tree, as multiples of a fixed loop of numpy and Python that is timed in the same rounds, and the
parts of a step. On a GPU a step of Qwen3-0.6B takes 3 to 5 ms; the host must need less.

    alone     no sequence shares anything
    system    all sequences share a system prompt
    levels    they share a system prompt, and groups of them documents
    samples   each prompt is continued in 16 sequences
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.harness import Rows, machine, parser, spread
from coppice import Engine, EngineConfig, SamplingParams
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.schedule.tiles import choose_tiles
from coppice.kernels.triton import plans as triton_plans
from coppice.runtime.runner import batch as batch_module
from coppice.runtime.runner.graphs import DecodeGraphs

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
VOCABULARY, HIDDEN = 64, 8
PROMPT, PAGE = 1024, 16
STEPS, WARM = 24, 6
MODEL = CostModel(choose_tiles(HEAD_DIM, 2), HEADS // KV_HEADS, KV_HEADS, HEAD_DIM, 4 * HEAD_DIM)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 40_960,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class PlansOnly(ReferenceBackend):
    """Makes the plans that Triton's kernels would get on a GPU, and computes no attention."""

    ordered = False

    def fixed_plans(self, sizes: Any, **options: Any) -> Any:
        return triton_plans.fixed_plans(
            sizes, device=torch.device("cpu"), deterministic=False, **options
        )

    def copy_pages(self, caches: Any, src: Any, dst: Any) -> None:
        pass


class NoModel:
    """Replaces the decoder: returns the same logits each time, and computes nothing."""

    def __init__(self, most: int) -> None:
        self._hidden = torch.zeros(most, HIDDEN)
        self._logits = torch.randn(most, VOCABULARY)

    def hidden_states(self, token_ids: torch.Tensor, *inputs: Any) -> torch.Tensor:
        plan, rows = inputs[4], inputs[5]
        if hasattr(plan, "schedule"):
            plan.schedule(None, MODEL)
        return self._hidden[: len(token_ids) if rows is None else len(rows)]

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.logits(self.hidden_states(*inputs))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


class NoDevice:
    """Replaces a GPU that captures graphs; a replay does nothing."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        return (lambda: None), run()

    def free_bytes(self) -> int:
        return 2**40


def make_engine(folder: Path, batch: int) -> Engine:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    engine = Engine(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            attention_backend="reference",
            device="cpu",
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            kv_cache_tokens=batch * (PROMPT + 256) + 8192,
            async_scheduling=True,
        )
    )
    engine.runner.decoder = NoModel(8192)  # type: ignore[assignment]
    engine.runner.attention = PlansOnly()
    engine.runner.capture(NoDevice(), (batch,), 256)
    return engine


def prompts(tree: str, batch: int) -> list[list[int]]:
    """Prompts of `PROMPT` tokens: one a sequence, or one for 16 sequences (`samples`)."""
    rng = np.random.default_rng(0)

    def draw(tokens: int) -> list[int]:
        return rng.integers(10, VOCABULARY, tokens).tolist()

    if tree == "alone":
        return [draw(PROMPT) for _ in range(batch)]
    if tree == "samples":
        return [draw(PROMPT) for _ in range(max(1, batch // 16))]
    system = draw(PROMPT // 2)
    if tree == "system":
        return [system + draw(PROMPT // 2) for _ in range(batch)]
    documents = [draw(PROMPT // 4) for _ in range(max(1, batch // 8))]
    return [system + documents[n // 8] + draw(PROMPT // 4) for n in range(batch)]


def unit() -> float:
    """Seconds of a fixed loop of numpy and Python, to see how fast the machine is now."""
    start = time.perf_counter()
    total, lines = 0, list(range(256))
    for _ in range(20):
        found = {each: each + 1 for each in lines}
        total += sum(found.values())
        array = np.arange(4096)
        total += int(np.cumsum(np.repeat(array, 2))[-1])
    return time.perf_counter() - start


@contextmanager
def timed(parts: dict[str, float]) -> Iterator[None]:
    """While it is open, adds up the seconds of some functions of a step, by name."""
    places: list[tuple[Any, str]] = [
        (batch_module, "shared_stretches"),
        (DecodeGraphs, "run"),
        (triton_plans, "build_tree_schedule"),
    ]
    found = [getattr(*place) for place in places]

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                parts[name] = parts.get(name, 0.0) + time.perf_counter() - start

        return call

    for (owner, name), function in zip(places, found, strict=True):
        setattr(owner, name, wrapped(name, function))
    try:
        yield
    finally:
        for (owner, name), function in zip(places, found, strict=True):
            setattr(owner, name, function)


def decode(engine: Engine, tree: str, batch: int, temperature: float) -> list[float]:
    """Seconds of each of `STEPS` steps in which all sequences decode."""
    engine.reset_cache()
    for number, prompt in enumerate(prompts(tree, batch)):
        params = SamplingParams(
            n=min(16, batch) if tree == "samples" else 1,
            temperature=temperature, seed=1, max_tokens=200, ignore_eos=True,
        )  # fmt: skip
        engine.add_request(str(number), prompt, params)
    graphs = engine.runner.graphs
    assert graphs is not None
    begun = graphs.steps["graph"]
    while graphs.steps["graph"] < begun + WARM:
        engine.step()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - start)
        assert len(outputs) == batch
    for number in range(batch):
        engine.abort(str(number))
    return seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    options.add_argument("--trees", nargs="+", default=["alone", "system", "levels", "samples"])
    arguments = options.parse_args()
    torch.set_num_threads(1)
    rows = Rows(arguments.json)
    where = machine()
    batches = [1, 16] if arguments.quick else arguments.batches
    for batch in batches:
        with tempfile.TemporaryDirectory() as folder:
            engine = make_engine(Path(folder), batch)
        for tree in arguments.trees:
            for temperature in (0.0, 1.0):
                steps, units = [], []
                for _ in range(1 if arguments.quick else arguments.rounds):
                    units.append(unit())
                    steps.append(statistics.median(decode(engine, tree, batch, temperature)))
                parts: dict[str, float] = {}
                with timed(parts):
                    decode(engine, tree, batch, temperature)
                calls = WARM + STEPS
                rows.add(
                    benchmark="host part of a decoding step",
                    batch=batch,
                    tree=tree,
                    temperature=temperature,
                    multiples=spread([s / u for s, u in zip(steps, units, strict=True)]),
                    times={
                        "step_ms": spread([1e3 * each for each in steps]),
                        "parts_ms": {
                            name: round(1e3 * each / calls, 3) for name, each in parts.items()
                        },
                    },
                    machine=where,
                )


if __name__ == "__main__":
    main()

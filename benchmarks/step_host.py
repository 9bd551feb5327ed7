"""The processor time of a step: what the engine does on the host when the model is free.

    python benchmarks/step_host.py [--quick] [--json FILE] [--rounds N] [--chunk TOKENS]
    python benchmarks/step_host.py --beside FOLDER ...

The engine is the real one, with asynchronous scheduling and graphs: scheduling, batch, attention
plans in the shape of Qwen3-0.6B's heads, packing of what is sent, choice of tokens, commit. Forward
passes are left out, and so is what a GPU adds: launches, pinned memory, events. Rows give
milliseconds a step for each batch and tree, as multiples of a fixed loop of numpy and Python that
is timed in the same rounds, and the parts of a step; and how many transfers of how many KiB go to
the device before a step's forward pass. On a GPU a step of Qwen3-0.6B takes 3 to 5 ms; the host
must need less.

    alone     no sequence shares anything
    system    all sequences share a system prompt
    levels    they share a system prompt, and groups of them documents
    samples   each prompt is continued in 16 sequences

With `--chunk` a new prompt of so many tokens is a part of each step. `--beside` measures checkouts
of other commits and this one in turn, with this script; `over_first` are the multiples of the first
one in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.harness import Rows, machine, parser, spread
from common.trees import HERE, INSIDE, in_turn
from coppice import Engine, EngineConfig, SamplingParams
from coppice.kernels import transfer
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


#: Bytes of each transfer to the device; and of those in the steps that were measured last.
sent: list[int] = []
sent_in_steps: list[int] = []
_pack = transfer._packed


def _packed(*given: Any) -> torch.Tensor:
    packed = _pack(*given)
    sent.append(packed.nbytes)
    return packed


transfer._packed = _packed

if hasattr(transfer, "Outbox"):  # else this script measures an earlier commit
    from coppice.kernels.triton.delivery import Blocks

    transfer.Outbox.packs = True  # as for a GPU

    class NoLaunch(Blocks):
        """Makes the table of the kernel that puts what was sent to its places; does not run it."""

        def launch(self, words: torch.Tensor, table: torch.Tensor) -> None:
            pass


class PlansOnly(ReferenceBackend):
    """Makes the plans that Triton's kernels would get on a GPU, and computes no attention."""

    ordered = False
    mixed_plans = True
    resident_tables = True

    def outbox(self, device: torch.device) -> Any:
        return transfer.Outbox(device, NoLaunch(device))

    def prepare(self, plan: Any, *, num_pages: int | None = None, outbox: Any = None) -> Any:
        plan.check(num_pages)
        if outbox is None:
            return triton_plans.PreparedPlan(plan, torch.device("cpu"), False)
        made = triton_plans.PreparedPlan(plan, torch.device("cpu"), False, self.tables)
        made.expect([(None, MODEL)], outbox)
        return made

    def fixed_plans(self, sizes: Any, *, most_sequences: Any = None, **options: Any) -> Any:
        return triton_plans.fixed_plans(
            sizes, device=torch.device("cpu"), deterministic=False, **self._tables, **options
        )

    @property
    def _tables(self) -> dict[str, Any]:
        found = getattr(self, "tables", None)
        return {} if found is None else {"tables": found}

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

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._logits[: len(hidden)]


class NoDevice:
    """Replaces a GPU that captures graphs; a replay does nothing."""

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return (lambda: None), run()

    def free_bytes(self) -> int:
        return 2**40


def make_engine(folder: Path, batch: int, chunk: int) -> Engine:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    engine = Engine(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            attention_backend="reference",
            device="cpu",
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            kv_cache_tokens=batch * (PROMPT + 256) + 8192 + 64 * chunk,
            async_scheduling=True,
        )
    )
    engine.runner.decoder = NoModel(8192)  # type: ignore[assignment]
    engine.runner.attention = PlansOnly()
    sizes = (batch, batch + chunk) if chunk else (batch,)
    engine.runner.capture(NoDevice(), sizes, 256)
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


def decode(engine: Engine, tree: str, batch: int, temperature: float, chunk: int) -> list[float]:
    """Seconds of each of `STEPS` steps in which all sequences decode, and a chunk is computed."""
    engine.reset_cache()
    rng = np.random.default_rng(1)
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
    sent.clear()
    for step in range(STEPS):
        if chunk:
            prompt = rng.integers(10, VOCABULARY, chunk).tolist()
            one = SamplingParams(temperature=temperature, max_tokens=1, ignore_eos=True)
            engine.add_request(f"prompt {step}", prompt, one)
        start = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - start)
        assert len(outputs) >= batch
    sent_in_steps[:] = sent
    for number in range(batch):
        engine.abort(str(number))
    while engine.has_unfinished():
        engine.step()
    return seconds


def sent_a_step() -> dict[str, float]:
    """What went to the device in the steps measured last; earlier commits pack nothing on a CPU."""
    if not sent_in_steps:
        return {}
    return {
        "transfers": round(len(sent_in_steps) / STEPS, 2),
        "kib_sent": round(sum(sent_in_steps) / STEPS / 1024, 1),
    }


def beside(arguments: argparse.Namespace, given: list[str]) -> None:
    """Measures the trees in turn, and writes a row for each of them and each kind of step."""
    rows = Rows(arguments.json)
    folders = [*arguments.beside, HERE]
    found: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    # The last of options that are given twice holds.
    told = [*given, "--rounds", "1", "--json", os.devnull]
    for row in in_turn(__file__, folders, told, 1 if arguments.quick else arguments.rounds):
        key = tuple(
            row.get(name) for name in ("benchmark", "batch", "chunk", "tree", "temperature")
        )
        found.setdefault(key, {}).setdefault(row["commit"], []).append(row)
    for commits in found.values():
        first = next(iter(commits.values()))
        for each in commits.values():
            ms = [row["times"]["step_ms"]["median"] for row in each]
            ratios = [a / b["times"]["step_ms"]["median"] for a, b in zip(ms, first, strict=True)]
            times = {"step_ms": spread(ms), "parts_ms": each[-1]["times"]["parts_ms"]}
            multiples = spread([row["multiples"]["median"] for row in each])
            rows.add(**{
                **each[-1], "over_first": spread(ratios), "multiples": multiples, "times": times
            })  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    options.add_argument("--trees", nargs="+", default=["alone", "system", "levels", "samples"])
    options.add_argument("--chunk", type=int, default=0, metavar="TOKENS")
    options.add_argument("--beside", type=Path, nargs="+", default=[], metavar="FOLDER")
    arguments = options.parse_args()
    if arguments.beside and INSIDE not in os.environ:
        beside(arguments, sys.argv[1:])
        return
    chunk = arguments.chunk
    torch.set_num_threads(1)
    rows = Rows(arguments.json)
    where = machine()
    batches = [1, 16] if arguments.quick else arguments.batches
    for batch in batches:
        with tempfile.TemporaryDirectory() as folder:
            engine = make_engine(Path(folder), batch, chunk)
        for tree in arguments.trees:
            for temperature in (0.0, 1.0):
                steps, units = [], []
                for _ in range(1 if arguments.quick else arguments.rounds):
                    units.append(unit())
                    found = decode(engine, tree, batch, temperature, chunk)
                    steps.append(statistics.median(found))
                parts: dict[str, float] = {}
                with timed(parts):
                    decode(engine, tree, batch, temperature, chunk)
                calls = WARM + STEPS
                rows.add(
                    benchmark=f"host part of a {'mixed' if chunk else 'decoding'} step",
                    batch=batch,
                    **({"chunk": chunk} if chunk else {}),
                    tree=tree,
                    temperature=temperature,
                    **sent_a_step(),
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

"""The launches of a step on a GPU, counted without one, by kind of step.

    python benchmarks/step_launches.py [--quick] [--json FILE] [--beside FOLDER ...]

The engine is the real one with the Triton backend and a model of Qwen3-0.6B's 28 layers, tiny in
all else. It runs on a CPU, where the launches of Triton's kernels, the operations of torch and the
transfers of a step's arrays are counted; kernels do not run, and a graph that is replayed counts as
one launch. Tokens are meaningless then, the numbers of launches are not. The medians of some steps:

    launches     all of these; `kernels`, `graphs`, `operations` and `transfers` are its parts

Kinds of steps: `rows` sequences that decode, greedily, by top-p, with logprobs or with penalties;
and the same beside a prompt of `chunk` tokens, a new one in each step.

--beside FOLDER: a checkout of another commit; its package is measured by this script in turn.
"""

from __future__ import annotations

import inspect
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.harness import Rows, machine, parser
from common.trees import HERE, INSIDE, in_turn

ROWS, CHUNK = 16, 40
WARM, STEPS = 4, 7
LAYERS = 28
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
#: What launches nothing: new tensors, other views of the same numbers, and tensors that are there.
NO_KERNELS = {
    "empty", "empty_like", "empty_strided", "new_empty", "view", "_unsafe_view", "slice", "select",
    "t", "transpose", "unsqueeze", "squeeze", "detach", "alias", "as_strided", "expand", "split",
    "split_with_sizes", "unbind", "permute", "_local_scalar_dense", "lift_fresh", "reshape",
    "resolve_conj", "resolve_neg", "to",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top-p": {"temperature": 0.9, "top_p": 0.9, "seed": 1},
    "greedy, logprobs": {"temperature": 0, "logprobs": 2},
    "greedy, penalties": {"temperature": 0, "repetition_penalty": 1.1},
}


class Launches(TorchDispatchMode):
    """Counts while it is entered, by kind; `install` must have been called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = function.name().removeprefix("aten::").partition(".")[0]
        made = function(*arguments, **(options or {}))
        same = name == "to" and made.data_ptr() == arguments[0].data_ptr()
        if name not in NO_KERNELS and not same:
            self.counts["operations"] += 1
        return made


class CountingRecorder:
    """Stands for capture on a GPU. A replay is counted, and changes nothing."""

    def __init__(self, launches: Launches) -> None:
        self._counts = launches.counts

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        def replay() -> None:
            self._counts["graphs"] += 1

        return replay, run()

    def free_bytes(self) -> int:
        return 2**40


def install(launches: Launches) -> None:
    """Has kernels counted instead of run, and a CPU's engine take the ways of a GPU's."""
    from triton.runtime.interpreter import GridExecutor

    from coppice.kernels import transfer
    from coppice.kernels.sampling import choose_triton
    from coppice.kernels.triton import backend, rows
    from coppice.runtime.model import layers
    from coppice.runtime.sampling import sampler

    counts = launches.counts

    def counted(executor: Any, *arguments: Any, **options: Any) -> None:
        counts["kernels"] += 1
        given = inspect.signature(executor.fn).bind_partial(*arguments).arguments
        if "tokens" in given:  # what chooses leaves no token that there is not
            with torch._C._DisableTorchDispatch():
                given["tokens"].zero_()

    usual = transfer.send

    def sent(arrays: Any, device: Any) -> Any:
        counts["transfers"] += 1
        return usual(arrays, device)

    if hasattr(transfer, "Outbox"):
        box = transfer.Outbox
        send = box.send

        def together(outbox: Any) -> None:
            counts["transfers"] += any((outbox._parcels, outbox._puts, outbox._writes))
            send(outbox)

        box.packs = True  # what is sent goes to its places by a kernel, as on a GPU

        def sent(arrays: Any, device: Any) -> Any:  # by an outbox, which counts
            return usual(arrays, device)

        box.send = together  # type: ignore[method-assign]

    class Fetched:
        """Tensors that are copied to the host, one by one."""

        def __init__(self, tensors: Any) -> None:
            counts["transfers"] += sum(each.numel() > 0 for each in tensors)
            with torch._C._DisableTorchDispatch():
                self._here = [each.clone() for each in tensors]

        def wait(self) -> Any:
            return self._here

    def choose(logits: torch.Tensor, columns: Any) -> torch.Tensor:
        if torch.is_tensor(columns):  # within a graph
            return choose_triton.choose_rows(logits, columns)
        (numbers,) = sent([columns], logits.device)
        return choose_triton.choose_rows(logits, numbers, *([columns] if _wants_host() else []))

    def _wants_host() -> bool:
        return "asked" in inspect.signature(choose_triton.choose_rows).parameters

    GridExecutor.__call__ = counted  # type: ignore[method-assign, assignment]
    backend.INTERPRETED = False  # results have their own type
    layers.gpu_rows = lambda device: rows
    sampler.Fetched = Fetched  # type: ignore[misc, assignment]
    replaced: dict[Any, Any] = {usual: sent}
    for name in ("choose", "choose_by"):
        found = getattr(sys.modules["coppice.kernels.sampling.choose"], name, None)
        if found is not None:
            replaced[found] = choose
    for module in [each for each in sys.modules.values() if each is not None]:
        if module.__name__.partition(".")[0] == "coppice":
            for name, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in replaced:
                    setattr(module, name, replaced[value])


def make_engine(folder: Path, launches: Launches, layers: int) -> Any:
    from coppice import Engine, EngineConfig

    install(launches)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    engine = Engine(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            attention_backend="triton",
            device="cpu",
            dtype="bfloat16",
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            kv_cache_tokens=2**16,
            async_scheduling=True,
        )
    )
    engine.runner.capture(CountingRecorder(launches), None, 64)
    return engine


def steps(engine: Any, launches: Launches, kind: str, chunk: int) -> dict[str, Any]:
    """Medians of steps of one kind; with a prompt of `chunk` new tokens in each, unless it is 0."""
    from coppice import SamplingParams

    engine.reset_cache()
    rng = np.random.default_rng(0)

    def add(name: str, tokens: int, most: int) -> None:
        params = SamplingParams(max_tokens=most, ignore_eos=True, **KINDS[kind])
        engine.add_request(name, rng.integers(10, 300, tokens).tolist(), params)

    def step() -> list[Any]:
        outputs = engine.step()
        for output in outputs:
            assert output.error is None, output.error
        return list(outputs)

    for number in range(ROWS):
        add(str(number), 20, 500)
    begun: set[str] = set()
    while len(begun) < ROWS:
        begun |= {output.request_id for output in step()}
    found: list[Counter[str]] = []
    for number in range(WARM + STEPS):
        if chunk:
            add(f"prompt {number}", chunk, 1)
        launches.counts.clear()
        with launches:
            step()
        found.append(Counter(launches.counts))
    for number in range(ROWS):
        engine.abort(str(number))
    while engine.has_unfinished():
        step()
    parts = {
        name: int(statistics.median([each[name] for each in found[WARM:]]))
        for name in ("kernels", "graphs", "operations", "transfers")
    }
    return {"launches": int(statistics.median([each.total() for each in found[WARM:]])), **parts}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--beside", type=Path, nargs="+", default=[], metavar="FOLDER")
    arguments = options.parse_args()
    rows = Rows(arguments.json)
    if INSIDE not in os.environ:
        quick = ["--quick"] if arguments.quick else []
        for row in in_turn(__file__, [*arguments.beside, HERE], quick, 1):
            rows.add(**row)
        return
    where = machine()
    launches = Launches()
    layers = 2 if arguments.quick else LAYERS
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), launches, layers)
    for chunk in (0, CHUNK):
        for kind in KINDS:
            found = steps(engine, launches, kind, chunk)
            row = {"benchmark": "launches of a step", "layers": layers, "rows": ROWS}
            rows.add(**row, chunk=chunk, kind=kind, **found, machine=where)


if __name__ == "__main__":
    main()

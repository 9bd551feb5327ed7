"""The kernels between the products: ours beside FlashInfer's and torch's, to choose among them.

Shapes are those of Llama-3.1-8B at a decoding step of 256 sequences and at a chunk of prefill.
FlashInfer may have to build its norm and its rotary embedding; if it cannot, the row says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.sampling.choose import choose, choose_by
from coppice.kernels.sampling.columns import COLUMNS, MOST_PROBABLE
from coppice.kernels.transfer import send
from gpu_suite.bench import Bench
from gpu_suite.worker import Row, reason

Ways = dict[str, Callable[[], object]]

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, PAGE = 4096, 32, 8, 128, 14336, 16


def row_kernels(bench: Bench, deadline: float) -> Iterator[Row]:
    """Measures each way of each kernel, beside the first way and the rate of a copy."""
    _, absent = _flashinfer()
    for count in (16,) if bench.quick else (256, 8192):
        for name, moved, make in (
            ("residual and norm", 4 * 2 * count * WIDTH, _norm),
            ("rotation and cache", 4 * count * (HEADS + 2 * KV_HEADS) * HEAD_DIM, _rotation),
            ("silu", 6 * count * INNER, _silu),
        ):
            yield from _measured(bench, deadline, name, count, moved, make(bench, count), absent)
    yield from choices(bench, deadline)


def choices(bench: Bench, deadline: float) -> Iterator[Row]:
    """Measures the choice of tokens at two vocabularies, by itself and as graphs have it."""
    flashinfer, absent = _flashinfer()
    for count in (4,) if bench.quick else (1, 256):
        for vocabulary in (300,) if bench.quick else (32_000, 151_936):
            moved = 4 * count * vocabulary
            for row in _measured(
                bench, deadline, "greedy choice", count, moved, _greedy(bench, count, vocabulary),
                absent,
            ):  # fmt: skip
                yield row | {"vocabulary": vocabulary}
            for top_k in (vocabulary, 50):
                ways = _choice(bench, count, vocabulary, top_k, flashinfer)
                name = "choice by top-p" if top_k == vocabulary else "choice by top-k and top-p"
                for row in _measured(bench, deadline, name, count, moved, ways, absent):
                    yield row | {"vocabulary": vocabulary}


def _measured(
    bench: Bench, deadline: float, name: str, count: int, moved: int, ways: Ways, absent: str
) -> Iterator[Row]:
    rounds = 3 if bench.quick else 50
    first: float | None = None
    for way, work in ways.items():
        stem = {"benchmark": "rows", "kernel": name, "rows": count, "way": way}
        if way == "flashinfer" and absent:
            yield stem | {"left_out": absent}
            continue
        if time.perf_counter() > deadline:
            yield stem | {"left_out": "the part's time was over"}
            continue
        try:
            seconds = bench.seconds(work, rounds)
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception as error:  # only this way fails: FlashInfer's compiler, for example
            yield stem | {"left_out": reason(error)}
            continue
        first = seconds if first is None else first
        yield stem | {
            "ratio": round(first / seconds, 3),
            "of_copy": round(moved / seconds / bench.roofs["copy"], 3),
            "times": {"us": round(1e6 * seconds, 2)},
        }


def _flashinfer() -> tuple[Any, str]:
    try:
        import flashinfer
    except Exception as error:
        return None, f"FlashInfer cannot be imported: {type(error).__name__}"
    return flashinfer, ""


def _made(bench: Bench, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=bench.device).bfloat16()


def _norm(bench: Bench, count: int) -> Ways:
    x, added, weight = _made(bench, count, WIDTH), _made(bench, count, WIDTH), _made(bench, WIDTH)
    ways: Ways = {}
    if not bench.quick:
        from coppice.kernels.triton.rows import rms_norm

        ways["ours"] = lambda: rms_norm(x, weight, 1e-5, added)

    def theirs() -> None:
        import flashinfer

        flashinfer.fused_add_rmsnorm(added, x, weight, 1e-5)  # in place

    ways["flashinfer"] = theirs
    ways["torch"] = lambda: torch.nn.functional.rms_norm(x.add_(added), (WIDTH,), weight, 1e-5)
    return ways


def _rotation(bench: Bench, count: int) -> Ways:
    """Rotates queries and keys, and writes keys and values to the pages of `count` sequences."""
    qk, v = _made(bench, count, HEADS + KV_HEADS, HEAD_DIM), _made(bench, count, KV_HEADS, HEAD_DIM)
    pages = _made(bench, 2, count, PAGE, KV_HEADS, HEAD_DIM)
    cache = LayerCache(pages[0], pages[1])
    angles = torch.randn(count, 1, HEAD_DIM, device=bench.device)
    slots = torch.arange(count, device=bench.device) * PAGE
    ways: Ways = {}
    if not bench.quick:
        from coppice.kernels.triton.backend import TritonBackend

        backend = TritonBackend(bench.device)
        ways["ours"] = lambda: backend.write_rotated(qk, v, angles, angles, cache, slots)
    heads = qk[:, :HEADS].contiguous().view(count, -1)
    keys = qk[:, HEADS:].contiguous().view(count, -1)
    table = torch.randn(4096, HEAD_DIM, device=bench.device)
    positions = torch.zeros(count, dtype=torch.int64, device=bench.device)
    index = torch.arange(count + 1, dtype=torch.int32, device=bench.device)
    ones = torch.ones(count, dtype=torch.int32, device=bench.device)

    def theirs() -> None:
        import flashinfer

        flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, heads, keys, HEAD_DIM, table)
        flashinfer.append_paged_kv_cache(
            keys.view(count, KV_HEADS, HEAD_DIM), v, index[:-1], positions.int(),
            (pages[0], pages[1]), index[:-1], index, ones,
        )  # fmt: skip

    ways["flashinfer"] = theirs

    def plainly() -> None:
        turned = qk * angles + qk.roll(HEAD_DIM // 2, -1) * angles
        cache.k.view(-1, KV_HEADS, HEAD_DIM).index_copy_(0, slots, turned[:, HEADS:].bfloat16())
        cache.v.view(-1, KV_HEADS, HEAD_DIM).index_copy_(0, slots, v)

    ways["torch"] = plainly
    return ways


def _silu(bench: Bench, count: int) -> Ways:
    x = _made(bench, count, 2 * INNER)
    ways: Ways = {}
    if not bench.quick:
        from coppice.kernels.triton.rows import silu_mul

        ways["ours"] = lambda: silu_mul(x)

    def theirs() -> None:
        import flashinfer

        flashinfer.silu_and_mul(x)

    ways["flashinfer"] = theirs
    ways["torch"] = lambda: torch.nn.functional.silu(x[:, :INNER]) * x[:, INNER:]
    return ways


def _captured(bench: Bench, logits: torch.Tensor, columns: np.ndarray) -> Callable[[], object]:
    """The choice with all launches that a graph has, whatever the columns ask for."""
    (numbers,) = send([columns], bench.device)
    if bench.device.type != "cuda":
        return lambda: choose_by(logits, numbers)
    choose_by(logits, numbers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose_by(logits, numbers)

    def replay(read: object = numbers) -> None:  # keeps what the graph reads
        graph.replay()

    return replay


def _greedy(bench: Bench, count: int, vocabulary: int) -> Ways:
    """The most probable token of each row."""
    logits = torch.randn(count, vocabulary, device=bench.device) * 3
    return {
        "ours": lambda: logits.argmax(dim=-1),
        "ours, in a graph": _captured(bench, logits, np.tile(MOST_PROBABLE, (count, 1))),
    }


def _choice(bench: Bench, count: int, vocabulary: int, top_k: int, flashinfer: Any) -> Ways:
    """Chooses a token of each row by temperature, top-k and top-p; others by top-p alone."""
    logits = torch.randn(count, vocabulary, device=bench.device) * 3
    columns = np.ones((count, COLUMNS))
    columns[:, 1:] = top_k, 0.95, 0.0, 0.5
    ways: Ways = {
        "ours": lambda: choose(logits, columns),
        "ours, in a graph": _captured(bench, logits, columns),
    }
    if top_k < vocabulary:
        return ways
    ways["flashinfer"] = lambda: flashinfer.sampling.top_p_sampling_from_probs(
        logits.softmax(dim=-1), 0.95
    )

    def sorting() -> torch.Tensor:
        found, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        sums = found.cumsum(dim=-1)
        kept = found * (sums - found < 0.95)
        chosen = (kept.cumsum(dim=-1) > 0.5 * kept.sum(dim=-1, keepdim=True)).int().argmax(dim=-1)
        return order.gather(1, chosen[:, None])

    ways["by sorting"] = sorting
    return ways

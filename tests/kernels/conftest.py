"""Random batches over random trees, on which every attention backend is tested."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fake_flashinfer import Library, without_interpreter

from coppice.kernels.attention.branches import Branches
from coppice.kernels.attention.interface import (
    AttentionBackend,
    AttentionCase,
    AttentionPlan,
    LayerCache,
    SharedStretch,
)
from coppice.kernels.backends import select_backend
from coppice.kernels.flashinfer.backend import FlashInferBackend
from coppice.kernels.schedule import cost
from coppice.kernels.schedule.cost import CostModel
from coppice.kernels.schedule.cpu import CpuCostModel


@dataclass
class Batch:
    """One step's input, built by the interface's rules alone; slots without an owner are NaN.

    ``tails`` are the sequences: rows of this step, and cached tokens beyond what the stretches
    cover. ``stretches`` are (members, pages), parents before children. ``trees`` has the sequences
    whose rows are a tree: the row before each of them but the first.
    """

    tails: Sequence[tuple[int, int]]
    stretches: Sequence[tuple[Sequence[int], int]] = ()
    page_size: int = 4
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    shuffled: bool = True
    seed: int = 0
    dtype: torch.dtype = torch.float32
    trees: Mapping[int, Sequence[int]] = field(default_factory=dict)
    plan: AttentionPlan = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        tables: list[list[int]] = [[] for _ in self.tails]
        stretches, used = [], 0
        for members, pages in self.stretches:
            first = len(tables[members[0]])
            stretches.append(SharedStretch(first, pages, np.array(members, dtype=np.int32)))
            for i in members:
                assert len(tables[i]) == first
                tables[i] += range(used, used + pages)
            used += pages
        rows = [rows for rows, _ in self.tails]
        context = []
        for table, (new, cached) in zip(tables, self.tails, strict=True):
            context.append(len(table) * self.page_size + cached + new)
            more = -(-context[-1] // self.page_size) - len(table)
            table += range(used, used + more)
            used += more
        self.num_pages = used + 3
        order = rng.permutation(self.num_pages) if self.shuffled else np.arange(self.num_pages)
        self.tables = [[int(order[page]) for page in table] for table in tables]
        self.plan = AttentionPlan(
            page_size=self.page_size,
            query_start=np.cumsum([0, *rows]).astype(np.int32),
            context_len=np.array(context, dtype=np.int32),
            page_indptr=np.cumsum([0, *map(len, tables)]).astype(np.int32),
            page_indices=np.concatenate(self.tables).astype(np.int32),
            stretches=tuple(stretches),
        )
        self._add_trees()
        shape = (self.num_pages, self.page_size, self.kv_heads, self.head_dim)
        self.k_cache = torch.full(shape, float("nan"))
        self.v_cache = torch.full(shape, float("nan"))
        slots = []
        for table, length, new in zip(self.tables, context, rows, strict=True):
            for t in range(length):
                page, slot = table[t // self.page_size], t % self.page_size
                if t >= length - new:
                    slots.append(page * self.page_size + slot)
                elif self.k_cache[page, slot].isnan().any():
                    self.k_cache[page, slot] = torch.randn(shape[2:])
                    self.v_cache[page, slot] = torch.randn(shape[2:])
        self.slots = torch.tensor(slots)
        # As a packed projection leaves them: heads contiguous in a row, rows further apart.
        heads = self.group * self.kv_heads
        packed = torch.randn(sum(rows), heads + 2 * self.kv_heads, self.head_dim)
        self.q, self.k, self.v = packed.split([heads, self.kv_heads, self.kv_heads], dim=1)
        for name in ("k_cache", "v_cache", "q", "k", "v"):
            setattr(self, name, getattr(self, name).to(self.dtype))
        self.scale = self.head_dim**-0.5

    def _add_trees(self) -> None:
        plan = self.plan
        starts = plan.context_len - np.diff(plan.query_start)
        #: Of each row: the keys of its sequence that it sees, by their slots; and its position.
        self.seen: list[tuple[dict[int, int], int]] = []
        positions, bits = [], []
        for i, (rows, _) in enumerate(self.tails):
            start = int(starts[i])
            before = {key: key for key in range(start)}
            parents = [-1, *self.trees[i]] if i in self.trees else range(-1, rows - 1)
            found: list[tuple[dict[int, int], int, int]] = []
            for row, parent in enumerate(parents):
                keys, place, mask = found[parent] if row else (before, start - 1, 0)
                keys = {**keys, start + row: place + 1}
                found.append((keys, place + 1, mask | 1 << row))
            self.seen += [(keys, place) for keys, place, _ in found]
            positions += [place for _, place, _ in found]
            bits += [mask if i in self.trees else 0 for _, _, mask in found]
        if self.trees:
            plan.branches = Branches(np.array(positions, np.int32), np.array(bits, np.int64))

    def run(
        self,
        backend: AttentionBackend,
        window: int | None = None,
        softcap: float | None = None,
        prepared: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's keys and values, and attend, on the backend's device.

        ``prepared`` replaces the result of the backend's ``prepare``.
        """
        device = getattr(backend, "device", torch.device("cpu"))
        q, k, v, slots = (each.to(device) for each in (self.q, self.k, self.v, self.slots))
        cache = LayerCache(*(e.to(device, copy=True) for e in (self.k_cache, self.v_cache)))
        backend.write_kv(k, v, cache, slots)
        if prepared is None:
            prepared = backend.prepare(self.plan, num_pages=self.num_pages)
        out, lse = backend.attend(
            q, k, v, cache, prepared,
            scale=self.scale, sliding_window=window, logit_softcap=softcap,
        )  # fmt: skip
        return out.cpu(), lse.cpu()

    def case(self, window: int | None = None) -> AttentionCase:
        return AttentionCase(
            num_heads=self.group * self.kv_heads, num_kv_heads=self.kv_heads,
            head_dim=self.head_dim, page_size=self.page_size, dtype=self.dtype,
            cache_dtype=self.dtype, scale=self.scale, sliding_windows=(window,),
        )  # fmt: skip

    def dense(self, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by brute force in float64, row by row and head by head, without a backend."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        k_cache.flatten(0, 1)[self.slots] = self.k
        v_cache.flatten(0, 1)[self.slots] = self.v
        outs, lses = [], []
        row = 0
        for i, (rows, _) in enumerate(self.tails):
            for _ in range(rows):
                keys, position = self.seen[row]
                low = 0 if window is None else max(0, position - window + 1)
                seen = [
                    self.tables[i][t // self.page_size] * self.page_size + t % self.page_size
                    for t, place in keys.items()
                    if place >= low
                ]
                for head in range(self.q.shape[1]):
                    keys = k_cache.flatten(0, 1)[seen, head // self.group].double()
                    values = v_cache.flatten(0, 1)[seen, head // self.group].double()
                    scores = keys @ self.q[row, head].double() * self.scale
                    outs.append(scores.softmax(0) @ values)
                    lses.append(scores.logsumexp(0))
                row += 1
        return torch.stack(outs).view(self.q.shape), torch.stack(lses).view(self.q.shape[:2])


#: Where Triton's kernels run in these tests: compiled on a GPU, or interpreted.
TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def triton_backend() -> AttentionBackend:
    return select_backend("triton", TRITON_DEVICE)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    if TRITON_DEVICE.type != "cuda":
        without_interpreter(monkeypatch)


@pytest.fixture(scope="session")
def size() -> int:
    """What lengths are multiplied by: real sizes where kernels are compiled, else small ones."""
    return 37 if TRITON_DEVICE.type == "cuda" else 1


#: What FlashInfer's kernels are tested in; on a GPU without a compiler they may be the only ones.
FLASHINFER_TYPE, FLASHINFER_HEAD_DIM = torch.bfloat16, 128 if torch.cuda.is_available() else 64


@pytest.fixture(scope="session")
def flashinfer_backend() -> AttentionBackend:
    """FlashInfer itself on a GPU; elsewhere ``fake_flashinfer``, which checks its arguments."""
    with pytest.MonkeyPatch.context() as patch:
        if TRITON_DEVICE.type != "cuda":
            patch.setitem(sys.modules, "flashinfer", Library())
            return FlashInferBackend(TRITON_DEVICE)
        batch = Batch([(1, 0)], dtype=FLASHINFER_TYPE, head_dim=FLASHINFER_HEAD_DIM)
        try:
            return FlashInferBackend(TRITON_DEVICE, batch.case())
        except ValueError as error:
            pytest.skip(str(error))


@pytest.fixture
def make_batch(request: pytest.FixtureRequest) -> Callable[..., Batch]:
    """Makes batches that the test's ``backend`` covers, unless they say otherwise."""
    if "backend" not in request.fixturenames:
        return Batch
    if request.getfixturevalue("backend").name != "flashinfer":
        return Batch
    return partial(Batch, dtype=FLASHINFER_TYPE, head_dim=FLASHINFER_HEAD_DIM)


@pytest.fixture
def fine_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is shared and split as finely as possible, so that small batches are merged too."""
    monkeypatch.setattr(cost, "SPLITS", (4, 32))
    monkeypatch.setattr(CostModel, "start_keys", 0)
    monkeypatch.setattr(CpuCostModel, "start_keys", 0)
    monkeypatch.setattr(CostModel, "row_bytes", 0)
    from coppice.kernels.triton.backend import TritonBackend

    usual = TritonBackend.cost_model

    def small_chip(*arguments: Any) -> CostModel:
        return replace(usual(*arguments), multiprocessors=1, launch_bytes=0)

    monkeypatch.setattr(TritonBackend, "cost_model", small_chip)

"""A scripted model for tests of schedules: its KV is real, its logits are a hash of what it reads.

The engine around it is the real one: tree, scheduler, paging, sampler, beams, pins. Only decoder,
attention and KV cache are replaced. Two layers, whose keys and values are one int64 a token:

    layer 0   key = hash(token, position, namespace), written to the token's slot
    layer 1   key = hash of layer 0's keys of the whole context, read back through the page table
    logits    hash of layer 1's keys of the whole context, read back the same way

So, as with a real model, a token depends on the KV of all tokens before it and on nothing else: a
wrong page, a copy that is missing, or KV that is stale or of another prefix gives other tokens.
Each key that is read is also compared with the one that the sequence's tokens give, so that the
faulty step itself raises; pages without an owner are poisoned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from coppice.kernels.attention.interface import AttentionPlan, FixedPlan, LayerCache
from coppice.kernels.attention.reference import ReferenceBackend
from coppice.kernels.transfer import Outbox
from coppice.radix import Namespace
from coppice.radix.node import Root
from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.requests.request import LATE, Sequence
from coppice.runtime.sampling.drafts.draft import Draft

VOCABULARY = 40
EOS = 2
_POISON = -0x0DEAD0DEAD0DEAD
_TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


class WrongKV(BaseException):
    """Attention read wrong KV. A BaseException, so that the engine does not handle it."""


class Interrupted(BaseException):
    """Stands for a KeyboardInterrupt in the middle of a step."""


def fake_checkpoint(folder: Path) -> Path:
    """Writes the config of a model without weights; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_TINY))
    return folder


def _mix(values: np.ndarray) -> np.ndarray:
    """A hash of each value, uint64 (the finalizer of MurmurHash3)."""
    values = values.astype(np.uint64)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(33))


def _first_keys(tokens: np.ndarray, positions: np.ndarray, salt: int) -> np.ndarray:
    """Layer 0's keys of tokens at positions, int64."""
    place = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(tokens.astype(np.uint64) + place + np.uint64(salt)).view(np.int64)


def _contexts(keys: np.ndarray) -> np.ndarray:
    """For each position a hash of the keys up to it, uint64; the order of keys matters."""
    places = np.arange(1, len(keys) + 1, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    return np.cumsum(_mix(keys.view(np.uint64) ^ places), dtype=np.uint64)


def _salt(namespace: Hashable) -> int:
    """Keeps the keys of requests with different cache salts, tenants or adapters apart."""
    assert isinstance(namespace, Namespace)
    text = namespace.cache_salt or ""
    if namespace.tenant is not None:
        text = f"{text} of {namespace.tenant}"
    if namespace.adapter is not None:
        text = f"{text} by {namespace.adapter}"
    return xxhash.xxh3_64_intdigest(text.encode())


class FakeAttention(ReferenceBackend):
    """Checks plans and copies pages as the real ones do; `FakeModel` does the reading.

    Page tables are on the device, too, and in each step compared with those of its plan.
    """

    resident_tables = True

    def __init__(self, model: FakeModel) -> None:
        self._model = model

    def copy_pages(self, caches: Any, src: Any, dst: Any) -> None:
        self._model.stumble("copy")
        super().copy_pages(caches, src, dst)

    def prepare(
        self, plan: AttentionPlan, *, num_pages: int | None = None, outbox: Outbox | None = None
    ) -> AttentionPlan:
        self._model.stumble("prepare")
        return super().prepare(plan, num_pages=num_pages)

    def fixed_plans(
        self,
        sizes: Seq[int],
        *,
        page_size: int,
        num_pages: int,
        max_pages: int,
        branches: bool = False,
        most_sequences: int | None = None,
    ) -> list[list[FakeFixedPlan]]:
        return [[FakeFixedPlan(num_pages)] for _ in sizes]


class FakeFixedPlan(FixedPlan):
    """Holds one plan at a time, of at most `most_pages` entries of page tables."""

    most_pages = 40

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages

    def load(self, plan: AttentionPlan, outbox: Outbox | None = None) -> bool:
        plan.check(self._num_pages)
        self._plan = plan
        return len(plan.page_indices) <= self.most_pages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


def check_tables(attention: FakeAttention, plan: AttentionPlan) -> None:
    """Raises WrongKV if the page tables on the device are not those of the plan."""
    if plan.table_start is None:
        return
    assert attention.tables is not None
    there = attention.tables.numpy()
    for index, start in enumerate(plan.table_start):
        table = plan.page_indices[plan.page_indptr[index] : plan.page_indptr[index + 1]]
        if not np.array_equal(there[start : start + len(table)], table):
            raise WrongKV(f"the device has another page table of sequence {index}")


class FakeModel:
    """Stands for the decoder, and holds the KV cache of its two layers."""

    def __init__(self, engine: Engine) -> None:
        shape = (engine.num_pages + 1, engine.config.page_size, 1, 1)  # with one for padding
        self.cache = [
            LayerCache(torch.full(shape, _POISON), torch.full(shape, _POISON)) for _ in range(2)
        ]
        self.failure: tuple[str, BaseException] | None = None  # (where, error) of the next step
        self.steps = 0
        self.coming: Callable[[], Collection[int]] = tuple  # pages that are filled when needed
        self._engine = engine
        self._running: list[Sequence] = []  # those of the step, in the order of its batch
        self._drafts: list[Draft | None] = []  # theirs
        self._flat = [
            tuple(each.numpy().reshape(-1) for each in (layer.k, layer.v)) for layer in self.cache
        ]
        schedule = engine.scheduler.schedule

        def remember() -> Any:
            made = schedule()
            self._running = [chunk.sequence for chunk in made.chunks]
            self._drafts = [chunk.draft for chunk in made.chunks]
            return made

        engine.scheduler.schedule = remember  # type: ignore[method-assign]

    def stumble(self, where: str) -> None:
        if self.failure is not None and self.failure[0] == where:
            error, self.failure = self.failure[1], None
            raise error

    # -- the decoder -------------------------------------------------------------------------

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.logits(self.hidden_states(*inputs))

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Any,
        attention: Any,
        plan: AttentionPlan,
        rows: torch.Tensor | None,
        changes: None = None,
    ) -> torch.Tensor:
        """Int64 [R, 1]: the hash of each row's context; rows that only pad come last."""
        assert changes is None
        self.steps += 1
        self.stumble("begin")
        check_tables(attention, plan)
        written = slots.numpy()
        real = int(plan.query_start[len(self._running)])
        if len(np.unique(written[:real])) != real:
            raise WrongKV("two rows of a step are written to one slot")
        spare = self._engine.num_pages * self._engine.config.page_size
        if (written[:real] >= spare).any() or (written[real:] < spare).any():
            raise WrongKV("padding is written to a page of the pool, or a row to that of padding")
        starts = plan.query_start
        states = np.zeros(len(written), np.uint64)
        keys = np.zeros(len(written), np.int64)
        for index, sequence in enumerate(self._running):
            mine = slice(int(starts[index]), int(starts[index + 1]))
            at, tokens = positions.numpy()[mine], token_ids.numpy()[mine]
            use = sequence.request.adapter
            if use is not None and use.mark is not None:
                tokens = np.where(at == use.begin, use.mark, tokens)
            keys[mine] = _first_keys(tokens, at, _salt(sequence.request.namespace))
        for layer, cache in enumerate(kv):  # taken when its turn comes, as the decoder does
            assert cache is self.cache[layer]
            self._write(layer, written, keys)
            self.stumble(f"layer {layer}")
            for index, sequence in enumerate(self._running):
                mine = slice(int(starts[index]), int(starts[index + 1]))
                draft = self._drafts[index]
                if draft is not None:
                    states[mine] = self._read_tree(layer, plan, index, sequence, draft)
                    continue
                last = int(token_ids[mine.stop - 1])
                read = self._read(layer, plan, index, sequence, last)
                states[mine] = read[mine.start - mine.stop :]
            keys = _mix(states).view(np.int64)
        chosen = slice(None) if rows is None else rows.numpy()
        return torch.from_numpy(states.view(np.int64)[chosen].reshape(-1, 1))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 [R, VOCABULARY], from -5 to 5."""
        self.stumble("logits")
        tokens = np.arange(1, VOCABULARY + 1, dtype=np.uint64) * np.uint64(0xA0761D6478BD642F)
        mixed = _mix(hidden.numpy().view(np.uint64) ^ tokens)
        made = torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) * (10 / 2**24) - 5)
        return made if out is None else out.copy_(made)

    def scores(self, hidden: torch.Tensor, tokens: tuple[int, int | None] | None) -> torch.Tensor:
        """Float32 [R, 3]: stands for a classifier's head."""
        return self.logits(hidden)[:, :3]

    def sleep(self, level: int) -> None:
        """Stands for the runner's: the KV cache is not kept."""
        self._engine.runner.asleep = level
        self._fill(0)

    def wake_up(self) -> None:
        self._engine.runner.asleep = 0
        self._fill(_POISON)

    def _fill(self, value: int) -> None:
        for layer in self.cache:
            for pages in (layer.k, layer.v):
                pages.fill_(value)

    def _write(self, layer: int, slots: np.ndarray, keys: np.ndarray) -> None:
        for cache, values in zip(self._flat[layer], (keys, ~keys), strict=True):
            cache[slots] = values

    def _read(
        self, layer: int, plan: AttentionPlan, index: int, sequence: Sequence, last: int
    ) -> np.ndarray:
        """The context hashes of all positions of a sequence, from the KV in its pages.

        `last` is the token of its last row, which may be late in the sequence itself.
        """
        table = plan.page_indices[plan.page_indptr[index] : plan.page_indptr[index + 1]]
        at = np.arange(int(plan.context_len[index]))
        slots = table[at // plan.page_size] * plan.page_size + at % plan.page_size
        tokens = np.frombuffer(sequence.keys(), np.int32)[: len(at)].copy()
        if tokens[-1] == LATE:
            tokens[-1] = last
        keys = self._check(
            layer, slots, tokens, _salt(sequence.request.namespace), "a sequence reads"
        )
        return _contexts(keys)

    def _read_tree(
        self, layer: int, plan: AttentionPlan, index: int, sequence: Sequence, draft: Draft
    ) -> np.ndarray:
        """The context hashes of a sequence's last token and of each token of its draft."""
        start = len(sequence.tokens) - 1
        rows = 1 + len(draft)
        assert int(plan.context_len[index]) == start + rows
        first, branches = int(plan.query_start[index]), plan.branches
        bits = [(2 << row) - 1 for row in range(rows)]  # of a chain
        at = np.arange(start, start + rows)
        if branches is not None and branches.seen[first]:
            bits = branches.seen[first : first + rows].tolist()
            at = branches.positions[first : first + rows]
        table = plan.page_indices[plan.page_indptr[index] : plan.page_indptr[index + 1]]
        states = np.zeros(rows, np.uint64)
        for row in range(rows):
            path = [0]
            here = row
            while here:
                path.insert(1, here)
                here = draft.tokens[here - 1].parent + 1
            if path != [each for each in range(rows) if bits[row] >> each & 1]:
                raise WrongKV(f"row {row} of a draft sees rows {bits[row]:b}, not {path}")
            if at[row] != start + len(path) - 1:
                raise WrongKV(f"row {row} of a draft is at position {at[row]}")
            places = np.concatenate([np.arange(start), [start + each for each in path]])
            slots = table[places // plan.page_size] * plan.page_size + places % plan.page_size
            drafted = np.array([draft.tokens[each - 1].token for each in path[1:]], np.int32)
            tokens = np.concatenate([np.frombuffer(sequence.keys(), np.int32), drafted])
            salt = _salt(sequence.request.namespace)
            states[row] = _contexts(self._check(layer, slots, tokens, salt, "a draft reads"))[-1]
        return states

    # -- checks ------------------------------------------------------------------------------

    def _check(
        self, layer: int, slots: np.ndarray, tokens: np.ndarray, salt: int, who: str
    ) -> np.ndarray:
        """The keys in these slots. Raises WrongKV if they aren't those of the tokens."""
        keys, values = (cache[slots] for cache in self._flat[layer])
        expected = _first_keys(tokens, np.arange(len(tokens)), salt)
        if layer:
            expected = _mix(_contexts(expected)).view(np.int64)
        wrong = np.flatnonzero((keys != expected) | (values != ~expected))
        if len(wrong):
            what = "poison" if keys[wrong[0]] == _POISON else "other KV"
            raise WrongKV(f"{who} {what} at position {wrong[0]} of {len(tokens)}, layer {layer}")
        return keys

    def check_cache(self) -> None:
        """Raises WrongKV if a page of the tree holds anything but its tokens' KV."""
        tree, coming = self._engine.tree, set(self.coming())
        for node in tree.nodes():
            root = node.path()[0].parent
            assert isinstance(root, Root)
            tokens = np.frombuffer(node.prefix(), np.int32)
            table: list[int] = []
            for each in node.path():
                del table[each.start // tree.page_size :]
                table += each.pages
            if not coming.isdisjoint(table):
                continue
            at = np.arange(len(tokens))
            pages = np.array(table)[at // tree.page_size]
            for layer in range(2):
                slots = pages * tree.page_size + at % tree.page_size
                self._check(layer, slots, tokens, _salt(root.namespace), "the tree names")

    def poison(self) -> None:
        """Overwrites the pages without an owner."""
        free = np.frombuffer(self._engine.tree.pool.refs, np.int32) <= 0
        free = np.append(free, True)  # the page for padding
        for copy in self._engine.scheduler._forks.values():
            free[copy.source] = False  # the next step reads it before anything is written
        for layer in self.cache:
            for pages in (layer.k, layer.v):
                pages[torch.from_numpy(free)] = _POISON


class FakeRecorder:
    """Stands for graph capture on a GPU: a replay runs the function again, to the same tensors."""

    def __init__(self) -> None:
        self.free = 1000
        self.recorded: list[tuple[torch.Tensor, ...]] = []
        self.each = 10  # bytes of a graph

    def record(
        self, run: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[Callable[[], None], tuple[torch.Tensor, ...]]:
        results = run()
        self.recorded.append(results)
        self.free -= self.each

        def replay() -> None:
            for place, made in zip(results, run(), strict=True):
                place.copy_(made)

        return replay, results

    def free_bytes(self) -> int:
        return self.free


def fake_engine(
    checkpoint: Path, *, graphs: Seq[int] | None = None, **options: Any
) -> tuple[Engine, FakeModel]:
    """An engine with these options of `EngineConfig`, and the model in it.

    `graphs` are the sizes of its graphs, which a `FakeRecorder` captures; None: no graphs. Steps
    have a token of each sequence, unless `speculation` is given.
    """
    options = {"speculation": "off", **options}
    config = EngineConfig(
        model=str(checkpoint), load_format="dummy", attention_backend="reference", **options
    )
    engine = Engine(config)
    model = FakeModel(engine)
    engine.runner.decoder = model  # type: ignore[assignment]
    engine.runner.attention = FakeAttention(model)
    engine.runner.kv_cache = model.cache
    engine.runner._make_tables()
    engine.runner.sleep = model.sleep  # type: ignore[method-assign]
    engine.runner.wake_up = model.wake_up  # type: ignore[method-assign]
    if graphs is not None:
        engine.runner.capture(FakeRecorder(), graphs, engine.config.max_num_seqs)
        model.steps = 0
    return engine, model

"""The interface of every attention backend, and the plan of a step that it takes.

The cache of one layer is two tensors, keys and values, each contiguous
``[num_pages, page_size, num_kv_heads, head_dim]``. The token at position ``t`` of a sequence lives
in page ``page_table[t // page_size]`` at slot ``t % page_size``; its flat slot number is
``page * page_size + slot``. Neighbouring pages are therefore one view
``[run * page_size, num_kv_heads, head_dim]``, which is why the pool hands out runs.

One step's batch, as attention sees it, for a sequence with ``n`` rows of queries::

    positions   0 ......... stretches end ......... context_len - n ......... context_len
                | shared stretches | private, cached | this step's own tokens |
                  read once for all                    (k, v; causal)

A row at position ``x`` sees the keys at positions ``<= x``, and with a sliding window ``w`` only
those at positions ``> x - w``.

The rows of a sequence may be a tree of tokens, of which one path will be kept (``Branches``). The
key of row j then lies where that of a chunk's row j would, in slot ``context_len - n + j`` of the
page table, though its position may be an earlier one. A row sees all keys before those of the tree,
and in the tree its ancestors and itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from coppice.kernels.attention.branches import Branches
from coppice.kernels.transfer import Outbox

#: What stored keys and values are multiplied by, each float32 ``[num_kv_heads]``.
KvScales = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """Keys and values of one layer, each ``[num_pages, page_size, num_kv_heads, head_dim]``.

    A cache of one of a backend's ``scaled_dtypes`` has ``scales``, any other none.
    """

    k: torch.Tensor
    v: torch.Tensor
    scales: KvScales | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` of each head of a row; ``weight`` is ``[H, D]``."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """What a model asks of attention: a backend may have kernels for some cases only.

    ``cache_dtype`` differs from ``dtype`` where the cache has scales or is rounded.
    ``sliding_windows`` are the distinct ones of its layers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    scale: float
    sliding_windows: tuple[int | None, ...] = (None,)
    logit_softcap: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SharedStretch:
    """A run of full pages that several sequences of the batch read.

    ``first_page`` and ``num_pages`` index the members' page tables: every member holds the same
    page ids at ``first_page .. first_page + num_pages - 1``. ``members`` is int32 ``[m]``, m >= 2,
    the indices of those sequences in the batch, ascending.
    """

    first_page: int
    num_pages: int
    members: np.ndarray


@dataclass(slots=True, eq=False)
class AttentionPlan:
    """One step's batch as attention sees it: made once a step, shared by all layers.

    ``query_start`` int32 ``[B + 1]``: rows ``query_start[i]:query_start[i + 1]`` of the queries
    belong to sequence i, which has at least one. ``context_len`` int32 ``[B]``: tokens of sequence
    i whose KV exists once this step's own are written, cached and new together. ``page_indptr``
    int32 ``[B + 1]`` and ``page_indices`` int32 ``[page_indptr[-1]]``: the page table of sequence i
    is ``page_indices[page_indptr[i]:page_indptr[i + 1]]``; it may be longer than the context needs.

    ``stretches``: those of one sequence tile a prefix of its page table, ``[0, a), [a, b), ...``
    (nested groups are the levels of the tree); what they do not cover is private. They hold only
    pages that lie wholly below every member's cached length, ``context_len`` less its rows.

    ``branches``: the rows that are trees; None: no sequence has any.

    ``table_start`` int32 ``[B]``: where in a backend's ``tables`` on the device the page table of
    each sequence begins, with the same entries; None: the page tables are not there.
    """

    page_size: int
    query_start: np.ndarray
    context_len: np.ndarray
    page_indptr: np.ndarray
    page_indices: np.ndarray
    stretches: tuple[SharedStretch, ...] = ()
    branches: Branches | None = None
    table_start: np.ndarray | None = None

    @property
    def table_starts(self) -> np.ndarray:
        """Where page tables begin: in ``tables`` if they are there, else in ``page_indices``."""
        return self.page_indptr[:-1] if self.table_start is None else self.table_start

    @property
    def num_sequences(self) -> int:
        return len(self.context_len)

    @property
    def num_rows(self) -> int:
        return int(self.query_start[-1])

    def rows_of(self, sequences: np.ndarray) -> np.ndarray:
        """The rows of these sequences, int64, in the order of the sequences."""
        counts = np.diff(self.query_start)[sequences].astype(np.int64)
        ends = np.cumsum(counts)
        shift = self.query_start[sequences] - (ends - counts)
        return np.arange(int(counts.sum())) + np.repeat(shift, counts)

    def check(self, num_pages: int | None = None) -> np.ndarray:
        """Refuse a plan that breaks the rules above, with a ``ValueError`` that names the field.

        Page ids must be below ``num_pages`` if that is given. Returns how many pages the stretches
        cover of each sequence, int32 ``[B]``. O(page tables + members), the former at memcmp speed.
        """
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; it must be at least 1")
        for name in ("query_start", "context_len", "page_indptr", "page_indices"):
            array = getattr(self, name)
            if not _is_int32_line(array):
                raise ValueError(
                    f"{name} is {_describe(array)}; it must be a contiguous 1-d int32 array"
                )
        batch = self.num_sequences
        if batch == 0:
            raise ValueError("context_len is empty; a plan needs at least one sequence")
        for name in ("query_start", "page_indptr"):
            array = getattr(self, name)
            if len(array) != batch + 1 or array[0] != 0 or (array[1:] <= array[:-1]).any():
                raise ValueError(
                    f"{name} is {brief(array)}; it must rise strictly from 0 over "
                    f"{batch + 1} entries, one more than the {batch} sequences"
                )
        if self.page_indptr[-1] != len(self.page_indices):
            raise ValueError(
                f"page_indptr ends at {self.page_indptr[-1]}; it must end at "
                f"{len(self.page_indices)}, the length of page_indices"
            )
        low, high = int(self.page_indices.min()), int(self.page_indices.max())
        if low < 0 or (num_pages is not None and high >= num_pages):
            limit = "" if num_pages is None else f" and below {num_pages}, the pages of the cache"
            raise ValueError(
                f"page_indices holds {low if low < 0 else high}; page ids must be at least 0{limit}"
            )
        rows = np.diff(self.query_start)
        pages = np.diff(self.page_indptr)
        bad = np.flatnonzero(
            (self.context_len < rows)
            | (self.context_len.astype(np.int64) > pages.astype(np.int64) * self.page_size)
        )
        if len(bad):
            i = int(bad[0])
            raise ValueError(
                f"context_len[{i}] is {self.context_len[i]}; sequence {i} has {rows[i]} rows and "
                f"{pages[i]} pages of {self.page_size} tokens, so it must be {rows[i]} to "
                f"{int(pages[i]) * self.page_size}"
            )
        if self.branches is not None:
            self.branches.check(self.query_start, self.context_len)
        if self.table_start is not None and len(self.table_start) != batch:
            raise ValueError(
                f"table_start has {len(self.table_start)} entries; it must have {batch}, one for "
                "each sequence"
            )
        return self._check_stretches((self.context_len - rows) // self.page_size)

    def _check_stretches(self, cached_pages: np.ndarray) -> np.ndarray:
        covered = np.zeros(self.num_sequences, dtype=np.int32)
        stretches = sorted(self.stretches, key=lambda s: s.first_page)
        if not stretches:
            return covered
        for stretch in stretches:
            if not _is_int32_line(stretch.members):
                raise ValueError(
                    f"members of {_named(stretch)} is {_describe(stretch.members)}; it must be a "
                    "contiguous 1-d int32 array"
                )
            if len(stretch.members) < 2:
                self._refuse_members(stretch)
            if stretch.num_pages < 1:
                raise ValueError(f"num_pages of {_named(stretch)} must be at least 1")
        # Entries: a member of a stretch each, in the order of stretches.
        members = np.concatenate([stretch.members for stretch in stretches])
        lengths = np.array([len(stretch.members) for stretch in stretches])
        which = np.repeat(np.arange(len(stretches)), lengths)
        first = np.array([stretch.first_page for stretch in stretches], np.int64)[which]
        end = first + np.array([stretch.num_pages for stretch in stretches], np.int64)[which]
        bad = (members < 0) | (members >= self.num_sequences)
        bad[1:] |= (members[1:] <= members[:-1]) & (which[1:] == which[:-1])
        if bad.any():
            self._refuse_members(stretches[which[bad.argmax()]])
        order = np.argsort(members, kind="stable")
        same = members[order[1:]] == members[order[:-1]]
        reached = np.zeros_like(end)
        reached[order[1:][same]] = end[order[:-1][same]]
        bad = reached != first
        if bad.any():
            at = int(bad.argmax())
            raise ValueError(
                f"first_page of {_named(stretches[which[at]])} must be {reached[at]} for sequence "
                f"{members[at]}: the stretches of a sequence tile a prefix of its page table"
            )
        bad = cached_pages[members] < end
        if bad.any():
            at = int(bad.argmax())
            raise ValueError(
                f"num_pages of {_named(stretches[which[at]])} reaches past the "
                f"{cached_pages[members[at]]} full cached pages of sequence {members[at]}"
            )
        # At memcmp speed: page tables are long, and there is one of each member.
        tables, item = self.page_indices.tobytes(), self.page_indices.itemsize
        starts = ((self.page_indptr[members] + first) * item).tolist()
        done = 0
        for stretch, count in zip(stretches, lengths.tolist(), strict=True):
            here, done = starts[done : done + count], done + count
            table = tables[here[0] : here[0] + stretch.num_pages * item]
            for i, start in zip(stretch.members, here, strict=True):
                if not tables.startswith(table, start):
                    raise ValueError(
                        f"members of {_named(stretch)}: the pages of sequences "
                        f"{stretch.members[0]} and {i} differ there"
                    )
        covered[members] = end  # a member's last entry remains, which reaches farthest
        return covered

    def _refuse_members(self, stretch: SharedStretch) -> None:
        raise ValueError(
            f"members of {_named(stretch)} is {brief(stretch.members)}; it must hold two or more "
            f"ascending sequence indices below {self.num_sequences}"
        )


class FixedPlan(ABC):
    """Room on the device for plans of decoding steps of a fixed number of rows, for a graph.

    A graph repeats launches with the addresses and grids that they had when it was captured. So
    the parts of a plan that kernels read lie at the same addresses in every step, and each grid is
    large enough for every plan that fits; programs for which a step has no work return at once.

        fixed.load(plan)                  of sequences with a row each, or some with drafts
        attend(..., fixed, ...)           in each layer: compiles, and learns the kinds of layers;
                                          then once more, captured
        if fixed.load(another): replay

    Loads and replays are queued on one stream, so that a load overwrites nothing that is still to
    be read.
    """

    _plan: AttentionPlan | None = None

    @property
    def plan(self) -> AttentionPlan:
        """The plan that was loaded last."""
        assert self._plan is not None, "no plan is loaded"
        return self._plan

    @abstractmethod
    def load(self, plan: AttentionPlan, outbox: Outbox | None = None) -> bool:
        """Have the next replay attend by this plan; False if it does not fit: do not replay then.

        What is sent goes with ``outbox``, which the caller sends if the plan fits, else alone.

        ``plan`` has as many rows as there is room for, and is checked as by
        ``AttentionBackend.prepare``. Sequences of several rows, and branches, may not fit. Waits
        for nothing.
        """


class AttentionBackend(ABC):
    """Attention over pages and the two writes to the cache, on one kind of device.

    A step calls ``prepare`` once, then for every layer ``write_kv`` and ``attend``. No result
    depends on earlier calls: a backend keeps compiled code, scratch memory and schedules only to
    save time. One thread calls it.
    """

    name: ClassVar[str]
    #: Types of the cache and of q, k, v that this backend computes in; the others are refused.
    dtypes: tuple[torch.dtype, ...]
    #: Types that the cache may have instead, with scales.
    scaled_dtypes: tuple[torch.dtype, ...] = ()
    #: Types that the cache may have instead where q, k, v are float32: rounded to nearest even.
    rounded_dtypes: tuple[torch.dtype, ...] = ()
    #: Whether ``attend`` takes a ``logit_softcap``.
    softcaps: ClassVar[bool] = False
    #: Whether plans may have ``branches``.
    branches: bool = False
    #: Whether fixed plans take any step of their number of rows, chunks of prompts among them.
    mixed_plans: ClassVar[bool] = False
    #: Whether it is faster with decoding sequences first, and those that share pages side by side.
    ordered: ClassVar[bool] = False

    #: Page tables on the device, int32 in one line, to which plans with ``table_start`` point.
    #: Whoever makes plans gives them, and keeps them up to date; None: no plan may point there.
    tables: torch.Tensor | None = None
    #: Whether plans may have ``table_start``.
    resident_tables: ClassVar[bool] = False

    #: Whether ``write_normed`` is one pass, and thus faster than a norm and ``write_rotated``.
    norms_heads: ClassVar[bool] = False

    @abstractmethod
    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        """Write keys and values ``[T, Hkv, D]`` to flat slots, int64 ``[T]`` without repeats.

        With scales, a stored number times the scale of its head is the value, and values beyond the
        range of the type are clamped to it.
        """

    def write_rotated(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        cache: LayerCache,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys ``[T, Hq + Hkv, D]`` and write the keys, and ``v``, to the cache.

        Returns both as ``attend`` takes them. ``cos`` and ``signed_sin`` are ``[T, 1, D]``, see
        ``rotate``. Backends that can do it in one pass override this.
        """
        qk = rotate(qk, cos, signed_sin)
        heads = qk.shape[1] - v.shape[1]
        q, k = qk[:, :heads], qk[:, heads:]
        self.write_kv(k, v, cache, slots)
        return q, k

    def write_normed(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        norm: HeadNorm,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        cache: LayerCache,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``write_rotated`` of the norms of queries and keys."""
        normed = F.rms_norm(qk, qk.shape[-1:], eps=norm.eps) * norm.weight
        return self.write_rotated(normed, v, cos, signed_sin, cache, slots)

    @abstractmethod
    def copy_pages(
        self, caches: Sequence[LayerCache], src: Sequence[int], dst: Sequence[int]
    ) -> None:
        """Copy page ``src[i]`` over page ``dst[i]`` in the keys and values of every layer.

        No page may be both a source and a destination, nor a destination twice: ``ValueError``.
        """

    def move_slots(
        self, caches: Sequence[LayerCache], src: Sequence[int], dst: Sequence[int]
    ) -> None:
        """Copy flat slot ``src[i]`` over slot ``dst[i]`` in the keys and values of every layer.

        All are read before any is written; no slot may be a destination twice.
        """
        if not caches or not len(src):
            return
        places = (torch.tensor(each, device=caches[0].k.device) for each in (src, dst))
        source, target = places
        for layer in caches:
            for pages in (layer.k, layer.v):
                flat = pages.flatten(0, 1)
                flat[target] = flat[source]

    def outbox(self, device: torch.device) -> Outbox:
        """An empty one, for what a step needs on that device."""
        return Outbox(device)

    @abstractmethod
    def prepare(
        self, plan: AttentionPlan, *, num_pages: int | None = None, outbox: Outbox | None = None
    ) -> Any:
        """Check the plan (``ValueError``) and turn it into what ``attend`` takes, once a step.

        What layers like those of the step before need on the device goes with ``outbox``, if one is
        given, which the caller sends before the first layer; what others need is sent when they
        ask.

        Page ids are checked only if ``num_pages``, the size of the cache, is given: without it, a
        kernel that is sent to a page beyond the cache reads other memory.
        """

    def fixed_plans(
        self,
        sizes: Sequence[int],
        *,
        page_size: int,
        num_pages: int,
        max_pages: int,
        branches: bool = False,
        most_sequences: int | None = None,
    ) -> Sequence[Sequence[FixedPlan]] | None:
        """Plans for graphs of decoding steps, for each number of rows in ``sizes``.

        None if the backend has none. A size may have several plans, for steps of different kinds: a
        step uses the first that can load its plan. A page table has at most ``max_pages`` of the
        ``num_pages`` of the cache. ``attend`` takes a fixed plan in place of the result of
        ``prepare``. The plans may share memory, since only one is loaded at a time. With
        ``branches`` they take such plans, too, if the backend does. With ``most_sequences`` no step
        has more of them, so sizes beyond the first that holds as many are of mixed steps alone.
        """
        return None

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        prepared: Any,
        *,
        scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
        lse_read: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend every row of the batch to the keys that it sees.

        ``q`` is ``[T, Hq, D]``; query head h reads KV head ``h // (Hq // Hkv)``. ``k`` and ``v``
        ``[T, Hkv, D]`` are this step's own keys and values, rotated, which ``write_kv`` has put in
        the cache already: a backend reads them from either place. Heads and ``D`` must be
        contiguous within a row. ``scale`` multiplies the products of queries and keys; a
        ``logit_softcap`` c then replaces each product x by c * tanh(x / c).

        Returns ``[T, Hq, D]`` in the type of ``q``, contiguous, and the natural logarithm of each
        row's sum of exponentials, float32 ``[T, Hq]``, by which results over disjoint keys are
        merged; without ``lse_read`` that may be anything. Row j of sequence i, which has ``n``
        rows, sits at position ``context_len[i] - n + j``, or where ``branches`` say.
        """


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[T, H, D]`` by the angles of its rows; returns a new contiguous tensor.

    Element i of a head's first half is paired with element i of its second, as in Hugging Face
    checkpoints: ``(a, b) -> (a cos - b sin, b cos + a sin)``. Rolling a head by half its width puts
    each element beside its partner, and the sign sits in the sine. Su et al. 2021 (RoFormer).
    """
    return (heads * cos).addcmul_(heads.roll(heads.shape[-1] // 2, dims=-1), signed_sin)


def _named(stretch: SharedStretch) -> str:
    return f"the stretch of pages {stretch.first_page}+{stretch.num_pages}"


def _is_int32_line(value: object) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.int32
        and value.ndim == 1
        and value.flags.c_contiguous
    )


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        spaced = "" if value.flags.c_contiguous else "spaced-out "
        return f"a {spaced}{value.ndim}-d {value.dtype} array"
    return f"a {type(value).__name__}"


def brief(values: Sequence[int] | np.ndarray) -> str:
    """The first eight values, for a message."""
    shown = ", ".join(str(int(v)) for v in values[:8])
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"

"""A schedule as the model takes it: flat tokens, slots, page tables, shared stretches.

A token that was sampled in the step before may still be on the device only (see `LateTokens`); the
batch then has its row among those. See docs/gpu-steps.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from coppice.kernels.attention.branches import Branches
from coppice.kernels.attention.interface import AttentionPlan, SharedStretch
from coppice.kernels.transfer import Outbox
from coppice.radix.tokens import TOKEN_BYTES, common_prefix
from coppice.runtime.model.adapters.changes import ActingRows
from coppice.runtime.requests.pooled_prompt import PooledPrompt
from coppice.runtime.requests.prompt_logprobs import PromptLogprobs
from coppice.runtime.requests.request import LATE, Sequence
from coppice.runtime.runner.drafts import (
    NO_DRAFTS,
    DraftRows,
    draft_counts,
    lay_drafts,
    tokens_of,
)
from coppice.runtime.runner.page_tables import PADDING, PageTables
from coppice.runtime.sampling.prompt_scores import PromptRows
from coppice.runtime.schedule.chunks import Schedule


def _nothing() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class LateTokens:
    """The tokens that a step sampled, int64 ``[R]`` on the device; the row of each sequence."""

    tokens: torch.Tensor
    row_of: Mapping[Sequence, int]

    def fill(self, token_ids: torch.Tensor, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Puts tokens in their rows of `token_ids`: int64 ``[T]``, ``[L]`` and ``[L]``."""
        token_ids.index_copy_(0, rows, self.tokens.index_select(0, sources))


class Inputs(NamedTuple):
    """What the model takes of a batch on the device; see `Batch`."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    prompt_rows: torch.Tensor


class PooledRows(NamedTuple):
    """Rows of a step that a prompt's pooling reads: how many, in order, and whose."""

    prompt: PooledPrompt
    size: int
    sequence: Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's input on the host. T rows of tokens, R of them with logits."""

    token_ids: np.ndarray  # int64 [T]; 0 where late
    positions: np.ndarray  # int64 [T]
    slots: np.ndarray  # int64 [T]: page * page_size + slot of each token's KV
    # int64 [R + D]: the last row of each sequence that reaches its end, then those of drafts.
    logit_rows: np.ndarray
    prompt_rows: np.ndarray  # int64 [S]: further rows, for logprobs of prompts and for pooling
    late_rows: np.ndarray  # int64 [L]: rows whose tokens are on the device
    late_from: np.ndarray  # int64 [L]: their rows among `LateTokens`
    sampled: list[Sequence]  # the R sequences; the engine adds siblings
    scored: list[PromptRows]  # what the first of those S rows are for, in order
    pooled: list[PooledRows]  # what the others are for
    plan: AttentionPlan
    acting: ActingRows | None = None  # rows on which adapters act
    drafts: tuple[DraftRows, ...] = ()  # what the D rows with logits are for
    # int32 [C]: entries of page tables on the device that change, and what they become.
    table_places: np.ndarray = field(default_factory=_nothing)
    table_pages: np.ndarray = field(default_factory=_nothing)

    @property
    def decodes(self) -> bool:
        """Whether all rows are the base model's and have logits: last tokens, and drafts."""
        alone = not len(self.prompt_rows) and self.acting is None
        return alone and len(self.logit_rows) == len(self.token_ids)

    def send(self, outbox: Outbox, late: LateTokens | None = None) -> Inputs:
        """Sends the batch, and all else that is in the outbox, to the device in one transfer."""
        arrays = [self.token_ids, self.positions, self.slots, self.logit_rows, self.prompt_rows]
        parcel = outbox.add([*arrays, self.late_rows, self.late_from])
        outbox.send()
        *sent, rows, sources = parcel.tensors
        if late is not None and len(self.late_rows):
            late.fill(sent[0], rows, sources)
        return Inputs(*sent)

    def padded(self, size: int, page: int) -> Batch:
        """A decoding step of `size` rows: sequences after the real ones have one token each.

        Their KV goes to the first slot of `page`, which no other sequence reads or writes: so they
        need no special treatment anywhere, and do not change the results of the others.
        """
        plan, more = self.plan, size - len(self.token_ids)
        if not more:
            return self
        table_ends = plan.page_indptr[-1] + np.arange(1, more + 1, dtype=np.int32)
        ones = np.ones(more, np.int32)
        nothing = np.zeros(more, np.int64)
        branches = plan.branches
        if branches is not None:
            branches = Branches(
                np.concatenate((branches.positions, nothing.astype(np.int32))),
                np.concatenate((branches.seen, nothing)),
            )
        return replace(
            self,
            token_ids=np.concatenate((self.token_ids, nothing)),
            positions=np.concatenate((self.positions, nothing)),
            slots=np.concatenate((self.slots, nothing + page * plan.page_size)),
            plan=AttentionPlan(
                page_size=plan.page_size,
                query_start=np.concatenate(
                    (plan.query_start, np.arange(size - more, size, dtype=np.int32) + np.int32(1))
                ),
                context_len=np.concatenate((plan.context_len, ones)),
                page_indptr=np.concatenate((plan.page_indptr, table_ends)),
                page_indices=np.concatenate((plan.page_indices, ones * np.int32(page))),
                stretches=plan.stretches,
                branches=branches,
                table_start=None
                if plan.table_start is None
                else np.concatenate((plan.table_start, np.full(more, PADDING, np.int32))),
            ),
        )


class BatchTree:
    """The shared stretches of the last batch: computed again only when they may have changed.

    While the same sequences run in the same order, and their page tables only grow at their ends,
    the stretches that were found are still shared. New pages are their sequence's own.
    """

    __slots__ = ("_full", "_sequences", "_stretches", "_tables")

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._tables: list[bytes] = []
        self._full = np.zeros(0, np.int32)
        self._stretches: tuple[SharedStretch, ...] = ()

    def stretches(
        self, sequences: list[Sequence], tables: list[bytes], full: np.ndarray
    ) -> tuple[SharedStretch, ...]:
        """`shared_stretches` of the page tables of `sequences`; `full` is int32 ``[B]``."""
        same = (
            sequences == self._sequences
            and bool((full >= self._full).all())
            and all(map(bytes.startswith, tables, self._tables))
        )
        if not same:
            self._stretches = shared_stretches(tables, full.tolist())
            self._sequences = sequences
        self._tables, self._full = tables, full
        return self._stretches


def build_batch(
    schedule: Schedule,
    page_size: int,
    late: LateTokens | None = None,
    tree: BatchTree | None = None,
    *,
    adapters: bool = False,
    resident: PageTables | None = None,
) -> Batch:
    """Lays out the chunks of a schedule one after the other; `late` has tokens that are `LATE`.

    `tree` keeps the stretches of the last batch; `adapters`: whether any may act; `resident`: what
    the device has of page tables. In a step in
    which all sequences decode, little Python runs for each: there may be hundreds, and the device
    waits.
    """
    chunks = schedule.chunks
    sequences = [chunk.sequence for chunk in chunks]
    counts = np.array([chunk.count for chunk in chunks], np.int32)
    if schedule.drafted:
        counts += draft_counts(schedule)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    tables = [sequence.table.tobytes() for sequence in sequences]
    page_indptr = _offsets([len(table) // TOKEN_BYTES for table in tables])
    page_indices = np.frombuffer(b"".join(tables), np.int32)
    query_start = _offsets(counts)

    total = int(query_start[-1])
    if total == len(chunks):
        owner = np.arange(total)
        positions = starts.astype(np.int64)
        token_ids = np.array([s.tokens[s.computed] for s in sequences], np.int64)
    else:
        owner = np.repeat(np.arange(len(sequences)), counts)
        positions = (np.arange(total) - query_start[owner] + starts[owner]).astype(np.int64)
        tokens = b"".join(map(tokens_of, chunks))
        token_ids = np.frombuffer(tokens, np.int32).astype(np.int64)
    # In the branches of drafts slots go on from token to token, and positions are by depth.
    slots = positions % page_size
    slots += page_indices[page_indptr[owner] + positions // page_size].astype(np.int64) * page_size
    late_rows = np.flatnonzero(token_ids == LATE)
    token_ids[late_rows] = 0
    late_from = np.zeros(0, np.int64)
    if len(late_rows):
        assert late is not None, "a token is neither here nor on the device"
        row_of = late.row_of
        late_from = np.array([row_of[sequences[each]] for each in owner[late_rows]], np.int64)
    ends = [chunk.start + chunk.count == len(chunk.sequence.tokens) for chunk in chunks]
    prompt_rows, scored, pooled = _prompt_rows(schedule, query_start)
    if pooled:  # they get no token
        ends = [
            end and not isinstance(chunk.sequence.reader, PooledPrompt)
            for end, chunk in zip(ends, chunks, strict=True)
        ]
    lasts = query_start[1:] - 1
    drafted = NO_DRAFTS
    if schedule.drafted:
        drafted = lay_drafts(schedule, query_start, positions, first=sum(ends))
        lasts = lasts - drafted.counts
    logit_rows = lasts[ends].astype(np.int64)
    if drafted.drafts:
        logit_rows = np.concatenate([logit_rows, drafted.rows])
    placed = resident.place(sequences, tables) if resident is not None else None
    plan = AttentionPlan(
        page_size=page_size,
        query_start=query_start,
        context_len=starts + counts,
        page_indptr=page_indptr,
        page_indices=page_indices,
        stretches=(tree or BatchTree()).stretches(sequences, tables, starts // page_size),
        branches=drafted.branches,
        table_start=placed.start if placed is not None else None,
    )
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        logit_rows=logit_rows,
        prompt_rows=prompt_rows,
        late_rows=late_rows,
        late_from=late_from,
        sampled=[sequence for sequence, end in zip(sequences, ends, strict=True) if end],
        scored=scored,
        pooled=pooled,
        plan=plan,
        acting=_acting_rows(schedule, query_start) if adapters else None,
        drafts=drafted.drafts,
        table_places=_nothing() if placed is None else placed.places,
        table_pages=_nothing() if placed is None else placed.pages,
    )


def _acting_rows(schedule: Schedule, query_start: np.ndarray) -> ActingRows | None:
    """The rows of a step on which adapters act; None if there are none."""
    numbers = np.full(int(query_start[-1]), -1, np.int64)
    for index, chunk in enumerate(schedule.chunks):
        use = chunk.sequence.request.adapter
        if use is not None:
            begin = int(query_start[index]) + max(0, use.begin - chunk.start)
            numbers[begin : query_start[index + 1]] = use.number
    return ActingRows.of(numbers)


def _prompt_rows(
    schedule: Schedule, query_start: np.ndarray
) -> tuple[np.ndarray, list[PromptRows], list[PooledRows]]:
    """The rows of a step that prompts' readers need, int64 [S], and what they are for."""
    rows: list[np.ndarray] = [np.zeros(0, np.int64)]
    scored: list[PromptRows] = []
    asked = [
        (index, chunk)
        for index, chunk in enumerate(schedule.chunks)
        if chunk.sequence.reader is not None
    ]
    pooled, pooled_rows = [], []
    for index, chunk in asked:
        sequence, prompt = chunk.sequence, chunk.sequence.reader
        if prompt is not None and (missing := prompt.rows(sequence.computed, chunk.count)):
            offset = int(query_start[index]) - sequence.computed
            places = np.arange(missing.start, missing.stop, dtype=np.int64) + offset
            if isinstance(prompt, PooledPrompt):
                pooled_rows.append(places)
                pooled.append(PooledRows(prompt, len(places), sequence))
            elif isinstance(prompt, PromptLogprobs):
                rows.append(places)
                tokens = sequence.tokens[missing.start + 1 : missing.stop + 1]
                scored.append(PromptRows(prompt, tokens))
    return np.concatenate(rows + pooled_rows), scored, pooled


def _offsets(lengths: Seq[int] | np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def shared_stretches(tables: Seq[bytes], full_pages: Seq[int]) -> tuple[SharedStretch, ...]:
    """The runs of full pages that two or more sequences have in common, at every level.

    `tables` are page tables as int32 bytes, of which the first `full_pages` entries hold tokens
    that are all computed. The prefix tree of the tables is read off their sorted order: with the
    common prefix of each with the next, every maximal interval that shares more than its
    surroundings is a node, and its stretch begins where its parent's ends. O(B log B) comparisons
    at memcmp speed for B sequences.
    """
    cut = [table[: pages * TOKEN_BYTES] for table, pages in zip(tables, full_pages, strict=True)]
    order = sorted(range(len(cut)), key=cut.__getitem__)
    stretches: list[SharedStretch] = []
    # Open intervals (shared pages, index in `order` of their first member), the outermost first.
    stack: list[tuple[int, int]] = []
    for index in range(1, len(order) + 1):
        shared = 0
        if index < len(order):
            shared = common_prefix(cut[order[index - 1]], 0, cut[order[index]]) // TOKEN_BYTES
        first = index - 1
        while stack and stack[-1][0] > shared:
            pages, first = stack.pop()
            outer = max(shared, stack[-1][0] if stack else 0)
            members = np.array(sorted(order[first:index]), np.int32)
            stretches.append(SharedStretch(outer, pages - outer, members))
        if shared and (not stack or stack[-1][0] < shared):
            stack.append((shared, first))
    stretches.reverse()  # parents before their children
    return tuple(stretches)

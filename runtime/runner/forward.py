"""The forward pass of one scheduled step, over a model and its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from coppice.kernels.attention.interface import LayerCache
from coppice.kernels.pages.transfers import PageTransfers, page_transfers
from coppice.runtime.config import EngineConfig
from coppice.runtime.metrics.window_keys import WindowKeys
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.parallel.group import ALONE, RankGroup
from coppice.runtime.runner.batch import Batch, BatchTree, LateTokens, PooledRows, build_batch
from coppice.runtime.runner.cache.size import NOTHING_BESIDE, Beside
from coppice.runtime.runner.loaded import LoadedModel
from coppice.runtime.sampling.prompt_scores import score_prompts
from coppice.runtime.schedule.chunks import Schedule
from coppice.runtime.schedule.paging import PageCopy, paired

if TYPE_CHECKING:  # it loads compiled code, which engines of one rank do not need
    from coppice.runtime.runner.ranks.pages import PagesPart


class Computed(NamedTuple):
    """What a forward pass gives.

    ``logits`` are float32 ``[R, vocabulary]`` of the batch's R `sampled` sequences, then of its
    `drafts`; the next pass may overwrite them. ``tokens`` int64 ``[R]`` were chosen for these rows
    by a graph; None: they are to be chosen.
    """

    batch: Batch
    logits: torch.Tensor
    tokens: torch.Tensor | None


class ModelRunner(LoadedModel):
    """A model in memory that computes steps.

    Attributes, beside those of `LoadedModel`:
        window_keys: what its sliding windows saved; None for a model without any.
        transfers: fill pages with what tiers bring; None: there are no tiers.
    """

    def __init__(
        self,
        config: EngineConfig,
        group: RankGroup = ALONE,
        *,
        beside: Beside = NOTHING_BESIDE,
        cached: bool = True,
    ) -> None:
        """As `LoadedModel`; raises as that does."""
        super().__init__(config, group, beside=beside, cached=cached)
        self.transfers: PageTransfers | None = None
        self._part_of_pages: PagesPart | None = None  # on other ranks than the first
        windows = self.model_config.sliding_windows
        self.window_keys = WindowKeys.of(windows, self.beside.page, self.page_size)
        self._tree = BatchTree()

    @torch.inference_mode()
    def run(
        self,
        schedule: Schedule,
        late: LateTokens | None = None,
        columns: Callable[[Batch], np.ndarray | None] | None = None,
    ) -> Computed:
        """Copies pages, computes the chunks, and scores prompts where that was asked for.

        `late` has the tokens that have not come back from the device. If the step is replayed, its
        graph chooses the tokens of the rows with logits by `columns`, the parameters of the choice,
        unless these are None.
        """
        copies = paired(schedule.copies)
        if self.attention.ordered:
            schedule.chunks.sort(
                key=lambda each: (
                    each.count > 1 or each.draft is not None,
                    each.sequence.table.tobytes(),
                )
            )
        adapters = self.adapters
        batch = build_batch(
            schedule,
            self.page_size,
            late,
            self._tree,
            adapters=bool(adapters and adapters.numbers),
            resident=self._tables,
        )
        if self.window_keys is not None:
            self.window_keys.step(batch.plan.context_len, batch.plan.query_start)
        with self.together():
            try:
                if self.group.size > 1:
                    arrays = replace(batch, sampled=[], scored=[], pooled=[], drafts=())
                    self.followers.compute(copies, arrays, 0 if late is None else len(late.tokens))
                logits, tokens, hidden = self._run(copies, batch, late, columns)
                if hidden is not None:
                    sampled = len(batch.logit_rows)
                    scored = sum(len(each.tokens) for each in batch.scored)
                    head = self.followers.head_of(hidden, self.decoder.logits)
                    score_prompts(hidden[sampled : sampled + scored], batch.scored, head)
                    self._pool(hidden[sampled + scored :], batch.pooled, head)
            except BaseException as error:
                if self._tables is not None:
                    self._tables.forget()  # what was to be written may not have been sent
                # The others wait within this step for what will not come.
                self.group.end(f"rank 0 of the model: {type(error).__name__}: {error}")
                raise
        return Computed(batch, logits, tokens)

    def _run(
        self,
        copies: Sequence[tuple[list[int], list[int]]],
        batch: Batch,
        late: LateTokens | None,
        columns: Callable[[Batch], np.ndarray | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Copies pages, computes a batch, and makes the logits of its rows that are sampled.

        Returns these, their tokens if a graph has chosen them, and the hidden states of all wanted
        rows if others are wanted, too.
        """
        transfers = self.transfers
        self.copy_pairs(copies)
        if late is not None and len(batch.late_rows):
            self.group.share(late.tokens)
        kv: Sequence[LayerCache] = self.kv_cache
        if transfers is not None and batch.decodes and self.graphs is not None:
            transfers.needed(batch.plan.page_indices)
        elif transfers is not None and self.group.size > 1:
            # Which layers have come differs from rank to rank, and so would the use of graphs.
            transfers.needed(batch.plan.page_indices)
        elif transfers is not None:
            kv = transfers.layers(batch.plan.page_indices)
        # A step with pages that are still coming takes them layer by layer, as no graph does.
        mixed = self.attention.mixed_plans and batch.acting is None and kv is self.kv_cache
        if self.graphs is not None and (batch.decodes or mixed):
            made = self.graphs.run(batch, late, lambda: columns(batch) if columns else None)
            if made is not None:
                hidden, logits, tokens = made
                if logits is None:
                    logits = self.decoder.logits(hidden[: len(batch.logit_rows)])
                return logits, tokens, hidden if len(batch.prompt_rows) else None
        outbox = self._outbox(batch)
        prepared = self.attention.prepare(batch.plan, num_pages=self.num_pages, outbox=outbox)
        sent = batch.send(outbox, late)
        inputs = (
            sent.token_ids,
            sent.positions,
            sent.slots,
            kv,
            self.attention,
            prepared,
        )
        changes = None
        if batch.acting is not None:
            assert self.adapters is not None
            changes = self.adapters.changes(batch.acting, (batch.logit_rows, batch.prompt_rows))
        if not len(batch.prompt_rows):
            return self.decoder.forward(*inputs, sent.logit_rows, changes), None, None
        rows = torch.cat((sent.logit_rows, sent.prompt_rows))
        hidden = self.decoder.hidden_states(*inputs, rows, changes)
        return self.decoder.logits(hidden[: len(batch.logit_rows)]), None, hidden

    @torch.inference_mode()
    def copy_pairs(self, copies: Sequence[tuple[list[int], list[int]]]) -> None:
        """Copies pages, this rank's parts of them; see `paired`."""
        for sources, targets in copies:
            if self.transfers is not None:
                self.transfers.needed([*sources, *targets])
            self.attention.copy_pages(self.kv_cache, sources, targets)

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copies pages, in order, before a step."""
        pairs = paired(copies)
        with self.together():
            self.followers.tell("copy_pairs", pairs)
            self.copy_pairs(pairs)

    def use_transfers(self, room: int) -> PageTransfers:
        """Copies pages to memory and back from now on, for tiers; returns what does.

        If the model is divided, pages of at most `room` bytes are on their way at a time. Raises as
        `DividedTransfers`.
        """
        self.transfers = own = page_transfers(lambda: self.kv_cache)
        if self.group.size > 1:
            from coppice.runtime.runner.ranks.pages import DividedTransfers

            self.transfers = DividedTransfers(self, own, room)
        return self.transfers

    @torch.inference_mode()
    def pages_task(self, name: str, *args: Any) -> None:
        """Does what the first rank's `DividedTransfers` has the others do."""
        if self._part_of_pages is None:
            from coppice.runtime.runner.ranks.pages import PagesPart

            self.transfers = page_transfers(lambda: self.kv_cache)
            self._part_of_pages = PagesPart(self.transfers, self.group, *args)
        else:
            getattr(self._part_of_pages, name)(*args)

    @torch.inference_mode()
    def move_slots(self, sources: list[int], targets: list[int]) -> None:
        """Copies the KV of slots `sources` to `targets`, for accepted branches of drafts."""
        with self.together():
            self.followers.tell("move_slots", sources, targets)
            self.attention.move_slots(self.kv_cache, sources, targets)

    def compute_part(
        self, copies: Sequence[tuple[list[int], list[int]]], batch: Batch, num_late: int
    ) -> torch.Tensor | None:
        """`_run` of the first rank's batch; its hidden states."""
        if self.transfers is not None:
            self.transfers.settle()
        late = None
        if num_late:
            late = LateTokens(torch.zeros(num_late, dtype=torch.int64, device=self.device), {})
        return self._run(copies, batch, late)[-1]

    def _pool(
        self,
        hidden: torch.Tensor,
        wanted: Sequence[PooledRows],
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Hands the rows that each prompt's pooling needs, `hidden` [S, hidden size], to it."""
        scores = self.decoder.scores
        if isinstance(self.decoder, Decoder):
            scores = partial(self.decoder.scores, head=head)
        at = 0
        for each in wanted:
            each.prompt.take(hidden[at : at + each.size], scores)
            at += each.size

    def fault(self) -> str | None:
        """The error that makes the device, or another rank, useless; None while all compute.

        After a kernel has failed (by an illegal address, say) CUDA answers every call with that
        error until the process ends. Other errors, such as a lack of memory, pass. Call it after a
        failure: it waits for all that is queued.
        """
        if self.group.ended is not None:
            return self.group.ended
        if self.device.type != "cuda":
            return None
        try:
            torch.cuda.synchronize(self.device)
        except Exception as error:
            lines = str(error).strip().splitlines()
            return lines[0] if lines else type(error).__name__
        return None

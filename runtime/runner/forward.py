"""A model and its KV cache as tensors, and the forward pass of one scheduled step over them."""

from __future__ import annotations

import gc
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from coppice.kernels.attention.interface import (
    AttentionPlan,
    FixedPlan,
    KvScales,
    LayerCache,
)
from coppice.kernels.cpu.ranks.errors import RanksEnded
from coppice.kernels.pages.transfers import PageTransfers
from coppice.kernels.sampling.choose import choose_by
from coppice.kernels.transfer import Outbox
from coppice.runtime.config import EngineConfig
from coppice.runtime.metrics.window_keys import WindowKeys
from coppice.runtime.model.adapters.loaded import LoadedAdapters
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.model.files.folder import check_model_folder
from coppice.runtime.model.files.path import resolve_model
from coppice.runtime.model.parallel.division import check_division, share_of
from coppice.runtime.model.parallel.group import ALONE, RankGroup
from coppice.runtime.model.reading.pooling import read_recipe
from coppice.runtime.model.weight_size import smaller_weights
from coppice.runtime.model.weights import resolve_device
from coppice.runtime.runner.attention import choose_attention
from coppice.runtime.runner.batch import Batch, BatchTree, LateTokens, PooledRows, build_batch
from coppice.runtime.runner.cache_size import (
    NOTHING_BESIDE,
    Beside,
    page_bytes,
    plan_cache,
    step_bytes,
    zeroed,
)
from coppice.runtime.runner.compiled_layers import compile_model
from coppice.runtime.runner.graphs import (
    CudaRecorder,
    DecodeGraphs,
    Head,
    Recorder,
    graph_sizes,
    mixed_sizes,
)
from coppice.runtime.runner.implementation import Model, choose
from coppice.runtime.runner.kv_scales import measure_scales
from coppice.runtime.runner.page_tables import PADDING, PageTables, entries_for
from coppice.runtime.runner.warm_up import warm_steps, warm_up
from coppice.runtime.sampling.drafts.draft import MOST_DRAFTED
from coppice.runtime.sampling.prompt_scores import score_prompts
from coppice.runtime.schedule.chunks import Schedule
from coppice.runtime.schedule.paging import copy_batches
from coppice.runtime.startup.memory import give_back_memory
from coppice.runtime.startup.room import explained

logger = logging.getLogger(__name__)


class Computed(NamedTuple):
    """What a forward pass gives.

    ``logits`` are float32 ``[R, vocabulary]`` of the batch's R `sampled` sequences, then of its
    `drafts`; the next pass may overwrite them. ``tokens`` int64 ``[R]`` were chosen for these rows
    by a graph; None: they are to be chosen.
    """

    batch: Batch
    logits: torch.Tensor
    tokens: torch.Tensor | None


class ModelRunner:
    """The model that `config` names, its kernels and its KV cache; runs forward passes.

    A model may be divided among the ranks of a group. The first rank's runner then has the others
    do what it does: each has its part of the weights and of every page (`take_part`).

    Attributes:
        model_config: the model's sizes and layers.
        recipe: what the checkpoint is made for beside text.
        decoder: the model.
        attention: the attention backend.
        kv_cache: keys and values of each layer, [pages, page_size, kv heads, head_dim]; in 8-bit
            floats with their scales.
        num_pages: pages of the cache.
        memory: how their number follows from the memory, as text.
        max_model_len: most tokens of a request, by the model, the config and the cache.
        beside: what this model takes beside another one, as its draft model.
        graphs: CUDA graphs of decoding steps; None: there are none.
        adapters: those that requests may use; None without `enable_lora`.
        window_keys: what its sliding windows saved; None for a model without any.
        asleep: 0, or the level of its sleep.
        warmed: what warming up took, as text; empty before, and on a CPU.
        transfers: fill pages with what tiers bring; None: there are no tiers.

    Raises ValueError if the model can't be loaded or does not support the options.
    """

    def __init__(
        self,
        config: EngineConfig,
        group: RankGroup = ALONE,
        *,
        beside: Beside = NOTHING_BESIDE,
        cached: bool = True,
    ) -> None:
        """`beside` is what a draft model takes. Without `cached` call `take_cache` before `run`."""
        self.device = resolve_device(config.device)
        if self.device.type == "cuda" and group.size > 1:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.group = group
        path = resolve_model(config.model, config.revision)
        check_model_folder(path, weights=config.load_format != "dummy")
        self._implementation = choose(path, config)
        model = self.model_config = self._implementation.config
        check_division(model, group.size)
        part = self._part = share_of(model, group.rank, group.size).part
        self.recipe = read_recipe(path, model)
        if config.max_model_len is not None and config.max_model_len > model.max_position:
            raise ValueError(
                f"max_model_len must be at most {model.max_position}, the model's own, "
                f"got {config.max_model_len}"
            )
        dtype = self._implementation.dtype(config, self.device)
        chosen = choose_attention(config, part, dtype, self.device)
        self.attention, cache_dtype = chosen.backend, chosen.cache_dtype
        self._config, self._dtype = config, dtype
        self.asleep = 0
        self.transfers: PageTransfers | None = None
        self.warmed = ""
        self._load_weights()
        self.page_size = config.page_size
        scales: Sequence[KvScales | None] = [None] * model.num_layers
        if chosen.scaled:
            scales = measure_scales(
                self.decoder,
                self.attention,
                cache_dtype=cache_dtype,
                dtype=dtype,
                device=self.device,
                page_size=self.page_size,
                vocabulary=model.vocab_size,
            )
        self.adapters: LoadedAdapters | None = None
        if config.enable_lora:
            self.adapters = LoadedAdapters(model, dtype, self.device)
        self.beside = Beside(
            page_bytes(part, self.page_size, cache_dtype), step_bytes(config, part, dtype)
        )
        self.window_keys = WindowKeys.of(model.sliding_windows, self.beside.page, self.page_size)
        self._scales, self._cache_dtype = scales, cache_dtype
        self._tree = BatchTree()
        self._tables: PageTables | None = None  # what the device has of page tables
        self._drafts = False  # whether graphs are for steps with drafts, too
        self._captured: tuple[Recorder, Sequence[int] | None, int] | None = None
        self.graphs: DecodeGraphs | None = None
        if cached:
            planned = plan_cache(config, part, dtype, self.device, cache_dtype, group, beside)
            self.take_cache(*planned)

    def take_cache(self, num_pages: int, memory: str) -> None:
        """Makes the KV cache with so many pages; `memory` says how these follow from the memory."""
        config = self._config
        self.num_pages, self.memory = num_pages, memory
        longest = config.max_model_len or self.model_config.max_position
        self.max_model_len = min(longest, num_pages * self.page_size)
        self._make_cache()
        if config.cuda_graph_sizes is not None and self.graphs is None:
            raise ValueError(
                f"cuda_graph_sizes is {config.cuda_graph_sizes}; with the {self.attention.name} "
                f"attention backend on {self.device} it must be None"
            )

    def _load_weights(self) -> None:
        config = self._config
        self.decoder: Model = self._implementation.load(
            config, dtype=self._dtype, device=self.device, group=self.group
        )
        with explained(
            "the weights, laid out for this processor,",
            sum(each.nbytes for each in self.decoder.parameters()),
            self.device,
            smaller_weights(config.quantization, self.device),
        ):
            self.decoder.pack()
            compile_model(self.decoder, self.attention)

    def _make_cache(self) -> None:
        """Makes the KV cache, and graphs, which hold its addresses."""
        model, config = self._part, self._config
        # One page beyond the pool's: the rows that pad a graph write their KV there.
        shape = (self.num_pages + 1, self.page_size, model.num_kv_heads, model.head_dim)
        place = shape, self._cache_dtype, self.device
        with explained(
            "the pages of the KV cache",
            self.num_pages * page_bytes(model, self.page_size, self._cache_dtype),
            self.device,
            "Give a smaller kv_cache_tokens or kv_cache_memory_fraction",
        ):
            self.kv_cache = [
                LayerCache(zeroed(*place), zeroed(*place), each) for each in self._scales
            ]
        self._make_tables()
        if self.device.type == "cuda" and not self.warmed:
            self.warm_up()
        if not config.enforce_eager and self.device.type == "cuda":
            self.capture(CudaRecorder(self.device), config.cuda_graph_sizes, config.most_seqs)

    def _make_tables(self) -> None:
        """Makes room on the device for page tables, if the backend reads them there."""
        if not self.attention.resident_tables:
            return
        entries = entries_for(self._config.most_seqs, -(-self.max_model_len // self.page_size))
        self._tables = PageTables(entries)
        self.attention.tables = torch.full(
            (entries,), self.num_pages, dtype=torch.int32, device=self.device
        )

    def _outbox(self, batch: Batch) -> Outbox:
        """One with what the batch changes in page tables on the device."""
        outbox = self.attention.outbox(self.device)
        if self.attention.tables is not None:
            outbox.write(self.attention.tables, batch.table_places, batch.table_pages)
        return outbox

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs every kind of step once; see `runner.warm_up`."""
        config = self._config
        drafts = config.speculation != "off" and self.attention.branches

        def compute(plan: AttentionPlan, positions: np.ndarray) -> torch.Tensor:
            slots = np.full(plan.num_rows, self.num_pages * self.page_size, np.int64)
            tokens = np.zeros(plan.num_rows, np.int64)
            lasts = plan.query_start[1:].astype(np.int64) - 1
            outbox = self.attention.outbox(self.device)
            if self.attention.tables is not None:
                one = np.ones(1, np.int32)
                outbox.write(self.attention.tables, one * PADDING, one * self.num_pages)
            prepared = self.attention.prepare(plan, num_pages=self.num_pages + 1, outbox=outbox)
            parcel = outbox.add([tokens, positions, slots, lasts])
            outbox.send()
            ids, places, sent_slots, rows = parcel.tensors
            return self.decoder.forward(
                ids, places, sent_slots, self.kv_cache, self.attention, prepared, rows, None
            )

        self.attention.copy_pages(self.kv_cache, [0], [self.num_pages])
        self.warmed = warm_up(
            compute,
            warm_steps(config.most_tokens, self.max_model_len, drafts=drafts),
            page_size=self.page_size,
            page=self.num_pages,
            vocabulary=self.model_config.vocab_size,
            device=self.device,
        )
        logger.info("%s", self.warmed)

    def expect_drafts(self, expected: bool) -> None:
        """Makes the graphs that steps with drafts need, if there are graphs; or those without."""
        self._tell("expect_drafts", expected)
        before = self.graphs
        if expected == self._drafts:
            return
        self._drafts = expected
        if before is not None and self._captured is not None:
            described, self.graphs = str(before), None
            del before
            gc.collect()
            self.memory = self.memory.replace(f"; {described}", "")
            self.capture(*self._captured)

    def sleep(self, level: int) -> None:
        """Frees the KV cache and graphs; no step may run until `wake_up`.

        At level 1 the weights stay in main memory, where those of a CPU's engine are anyway; at
        level 2 they are dropped, and read from the checkpoint again. What kernels compiled and
        their workspaces stay.
        """
        self._tell("sleep", level)
        self.asleep = level
        self.graphs = None
        self._tables = self.attention.tables = None
        self.decoder.compiled = None  # it holds addresses of weights and caches
        self.kv_cache.clear()
        if self.adapters is not None:
            self.adapters.move(torch.device("cpu"))
        if level == 2:
            del self.decoder
        else:
            self.decoder.to("cpu")
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        else:
            give_back_memory()

    def wake_up(self) -> None:
        """Undoes `sleep`; the cache is empty. Raises ValueError if the weights can't be read."""
        self._tell("wake_up")
        if self.asleep == 2:
            self._load_weights()
        elif self.asleep == 1:
            self.decoder.to(self.device)
            compile_model(self.decoder, self.attention)
        if self.adapters is not None:
            self.adapters.move(self.device)
        self._make_cache()
        self.asleep = 0

    @torch.inference_mode()
    def capture(self, recorder: Recorder, sizes: Sequence[int] | None, max_num_seqs: int) -> None:
        """Captures graphs of decoding steps, for each of ``sizes``, if the backend has plans.

        With drafts a step has more rows than sequences: one of these may have a whole draft. Of a
        model that is divided the head is not captured, since its parts are gathered.
        """
        self._captured = recorder, sizes, max_num_seqs
        most = max(max_num_seqs, 1 + MOST_DRAFTED) if self._drafts else max_num_seqs
        if sizes is None:
            sizes = graph_sizes(most)
            if self.attention.mixed_plans:
                sizes += mixed_sizes(most, self._config.most_tokens)
        sizes = sorted(sizes)
        if self.attention.tables is None:
            self._make_tables()
        plans = self.attention.fixed_plans(
            sizes,
            page_size=self.page_size,
            num_pages=self.num_pages + 1,
            max_pages=-(-self.max_model_len // self.page_size),
            branches=self._drafts and self.attention.branches,
            most_sequences=most,
        )
        if plans is None:
            logger.info("no CUDA graphs: the %s backend offers none", self.attention.name)
            return

        def forward(
            token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: FixedPlan
        ) -> torch.Tensor:
            return self.decoder.hidden_states(
                token_ids, positions, slots, self.kv_cache, self.attention, plan, None
            )

        self.graphs = DecodeGraphs(
            forward,
            plans,
            sizes,
            recorder,
            page_size=self.page_size,
            spare_page=self.num_pages,
            device=self.device,
            head=Head(self.decoder.logits, choose_by, most) if self.group.size == 1 else None,
            outbox=self._outbox,
            resident=self.attention.tables is not None,
        )
        logger.info("%s", self.graphs)
        if not self.asleep:
            self.memory += f"; {self.graphs}"

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
        copies = [
            ([copy.source for copy in batch], [copy.target for copy in batch])
            for batch in copy_batches(schedule.copies)
        ]
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
        if self.group.size > 1:
            arrays = replace(batch, sampled=[], scored=[], pooled=[], drafts=())
            self._tell("_compute", copies, arrays, 0 if late is None else len(late.tokens))
        try:
            logits, tokens, hidden = self._run(copies, batch, late, columns)
            if hidden is not None:
                sampled = len(batch.logit_rows)
                scored = sum(len(each.tokens) for each in batch.scored)
                head = self._head_of(hidden)
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
        for sources, targets in copies:
            if transfers is not None:
                transfers.needed([*sources, *targets])
            self.attention.copy_pages(self.kv_cache, sources, targets)
        if late is not None and len(batch.late_rows):
            self.group.share(late.tokens)
        kv: Sequence[LayerCache] = self.kv_cache
        if transfers is not None and batch.decodes and self.graphs is not None:
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
    def move_slots(self, sources: list[int], targets: list[int]) -> None:
        """Copies the KV of slots `sources` to `targets`, for accepted branches of drafts."""
        self._tell("move_slots", sources, targets)
        self.attention.move_slots(self.kv_cache, sources, targets)

    # -- ranks -------------------------------------------------------------------------------

    @torch.inference_mode()
    def take_part(self) -> None:
        """Does what the first rank's runner does, until the group ends; on the other ranks.

        Raises what fails, and when the group has ended.
        """
        hidden: torch.Tensor | None = None
        while True:
            method, args = pickle.loads(self.group.receive())
            if method == "_compute":
                hidden = self._compute(*args)
            elif method == "_logits":
                first, count = args
                assert hidden is not None
                self.decoder.logits(hidden[first : first + count])
            else:
                getattr(self, method)(*args)

    def _compute(
        self, copies: Sequence[tuple[list[int], list[int]]], batch: Batch, num_late: int
    ) -> torch.Tensor | None:
        """`_run` of the first rank's batch; its hidden states."""
        late = None
        if num_late:
            late = LateTokens(torch.zeros(num_late, dtype=torch.int64, device=self.device), {})
        return self._run(copies, batch, late)[-1]

    def _tell(self, method: str, *args: Any) -> None:
        """Has the other ranks call a method of theirs, as this one does now."""
        if self.group.size > 1 and self.group.rank == 0:
            self.group.send(pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL))

    def _head_of(self, hidden: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head for rows of `hidden`, in which all ranks take part."""
        if self.group.size == 1:
            return self.decoder.logits

        def logits(rows: torch.Tensor) -> torch.Tensor:
            first = (rows.storage_offset() - hidden.storage_offset()) // hidden.stride(0)
            self._tell("_logits", first, len(rows))
            return self.decoder.logits(rows)

        return logits

    def _leave(self) -> None:
        """Ends `take_part`."""
        raise RanksEnded("the engine was closed")

    def close(self) -> None:
        """Frees cache and weights for good, and ends the other ranks."""
        try:
            if self.group.ended is None:
                if self.asleep < 2:
                    self.sleep(2)
                self._tell("_leave")
        finally:
            self.group.close()

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

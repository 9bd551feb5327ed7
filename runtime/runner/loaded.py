"""A model and its KV cache as tensors: loaded, warmed up, captured as graphs, asleep and woken."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from coppice.kernels.attention.interface import FixedPlan, KvScales
from coppice.kernels.sampling.choose import choose_by
from coppice.kernels.transfer import Outbox
from coppice.runtime.config import EngineConfig
from coppice.runtime.model.adapters.loaded import LoadedAdapters
from coppice.runtime.model.files.folder import check_model_folder
from coppice.runtime.model.files.path import resolve_model
from coppice.runtime.model.parallel.division import check_division, share_of
from coppice.runtime.model.parallel.group import ALONE, RankGroup
from coppice.runtime.model.reading.pooling import read_recipe
from coppice.runtime.model.weight_size import smaller_weights
from coppice.runtime.model.weights import resolve_device
from coppice.runtime.runner.attention import choose_attention
from coppice.runtime.runner.batch import Batch
from coppice.runtime.runner.cache.pages import make_pages
from coppice.runtime.runner.cache.resident import populate_first
from coppice.runtime.runner.cache.scales import measure_scales
from coppice.runtime.runner.cache.size import (
    NOTHING_BESIDE,
    Beside,
    page_bytes,
    plan_cache,
    step_bytes,
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
from coppice.runtime.runner.page_tables import PageTables, entries_for
from coppice.runtime.runner.ranks.following import Followers
from coppice.runtime.runner.ranks.interrupts import interrupts_wait
from coppice.runtime.runner.warm_up import (
    one_page_steps,
    time_drafts,
    warm_code_steps,
    warm_steps,
    warm_up,
)
from coppice.runtime.sampling.drafts.draft import MOST_DRAFTED
from coppice.runtime.startup.memory import give_back_memory
from coppice.runtime.startup.room import explained
from coppice.runtime.tiers.digest import weights_stamps

logger = logging.getLogger(__name__)


class LoadedModel:
    """The model that `config` names, its kernels, its KV cache and its graphs.

    A model may be divided among the ranks of a group. The first rank then has the others do what it
    does: each has its part of the weights and of every page (`ranks.following`).

    Attributes:
        model_config: the model's sizes and layers.
        stamps: of the files of weights, before they were read; see `weights_stamps`.
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
        asleep: 0, or the level of its sleep.
        warmed: what warming up took, as text; empty before.
        draft_seconds: seconds of a step of one sequence by its drafted tokens, ascending; empty
            unless warming up has measured them.
        followers: the other ranks, which do what this one does.

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
        """`beside`: what a draft model takes. Without `cached` the cache comes by `take_cache`."""
        self.device = resolve_device(config.device)
        if self.device.type == "cuda" and group.size > 1:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.group, self.followers = group, Followers(group)
        path = self.path = resolve_model(config.model, config.revision)
        check_model_folder(path, weights=config.load_format != "dummy")
        self.stamps = weights_stamps(path)
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
        chosen = choose_attention(
            config,
            part,
            dtype,
            self.device,
            cache_dtype=self._implementation.cache_dtype(config, self.device),
        )
        self.attention, cache_dtype = chosen.backend, chosen.cache_dtype
        self._config, self._dtype = config, dtype
        self.asleep = 0
        self.warmed = ""
        self.draft_seconds: list[tuple[int, float]] = []
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
        self._scales, self._cache_dtype = scales, cache_dtype
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
        config = self._config
        self.kv_cache = make_pages(
            self._part,
            self.num_pages,
            self.page_size,
            self._cache_dtype,
            self.device,
            self._scales,
        )
        if self.device.type == "cpu":
            populate_first([part for each in self.kv_cache for part in (each.k, each.v)])
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
        drafts = config.makes_drafts(on_gpu=self.device.type == "cuda") and self.attention.branches
        self.attention.copy_pages(self.kv_cache, [0], [self.num_pages])
        steps = one_page_steps(
            self.decoder, self.attention, self.kv_cache, self.page_size, self.num_pages, self.device
        )
        on_cpu = self.attention.name == "cpu"
        kinds = warm_code_steps if on_cpu else warm_steps
        self.warmed = warm_up(
            steps,
            kinds(config.most_tokens, self.max_model_len, drafts=drafts),
            page_size=self.page_size,
            page=self.num_pages,
            vocabulary=self.model_config.vocab_size,
            device=self.device,
        )
        if drafts and on_cpu:
            self.draft_seconds = time_drafts(
                steps, config.most_tokens, self.max_model_len, page_size=self.page_size,
                page=self.num_pages, together=self.group.size > 1,
            )  # fmt: skip

    def expect_drafts(self, expected: bool) -> None:
        """Makes the graphs that steps with drafts need, if there are graphs; or those without."""
        self.followers.tell("expect_drafts", expected)
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
        self.followers.tell("sleep", level)
        self.asleep = level
        self.graphs = None
        self._tables = self.attention.tables = None
        self.kv_cache.clear()
        self._put_weights_away(level)

    def _put_weights_away(self, level: int) -> None:
        """Frees the device's memory of weights, whether or not all of them are there."""
        if self.adapters is not None:
            self.adapters.move(torch.device("cpu"))
        if level == 2:
            self.__dict__.pop("decoder", None)
        else:
            self.decoder.compiled = None  # it holds addresses of weights and caches
            self.decoder.to("cpu")
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        else:
            give_back_memory()

    def wake_up(self) -> None:
        """Undoes `sleep`; the cache is empty.

        Raises ValueError if the weights can't be read; it sleeps on then, as do all ranks if one of
        them can't.
        """
        with self.together():
            self.followers.tell("wake_up")
            failed: Exception | None = None
            try:
                self._bring_weights()
            except Exception as error:
                failed = error
            if not self.group.least(int(failed is None)):
                self._put_weights_away(self.asleep)
                if self.group.rank == 0:
                    raise failed or ValueError(
                        "wake_up: another rank of the model can't load the weights; its log says "
                        "why"
                    )
                if failed is not None:
                    logger.error("rank %d can't wake up: %s", self.group.rank, failed)
                return
            try:
                self._make_cache()
            except BaseException as error:
                # The others go on, and would wait for this rank.
                reason = f"{type(error).__name__}: {error}"
                self.group.end(f"rank {self.group.rank} of the model: {reason}")
                raise
            self.asleep = 0

    def together(self) -> AbstractContextManager[None]:
        """What all ranks do together, or none: an interrupt comes before it or after it."""
        return interrupts_wait() if self.group.size > 1 else nullcontext()

    def _bring_weights(self) -> None:
        """Reads the weights again, or brings them back to the device."""
        if self.asleep == 2:
            self.stamps = weights_stamps(self.path)
            self._load_weights()
        elif self.asleep == 1:
            self.decoder.to(self.device)
            compile_model(self.decoder, self.attention)
        if self.adapters is not None:
            self.adapters.move(self.device)

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
            agree=lambda stops: self.group.least(0 if stops else 1) == 0,
        )
        logger.info("%s", self.graphs)
        if not self.asleep:
            self.memory += f"; {self.graphs}"

    def close(self) -> None:
        """Frees cache and weights for good, and ends the other ranks."""
        try:
            if self.group.ended is None:
                if self.asleep < 2:
                    self.sleep(2)
                self.followers.leave()
        finally:
            self.group.close()

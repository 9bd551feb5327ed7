"""A transformers model's pass as one compiled call, where its operations are known."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from coppice.kernels.attention.interface import AttentionBackend, AttentionPlan, LayerCache
from coppice.kernels.cpu.attention.arguments import items_of
from coppice.kernels.cpu.backend import CpuBackend
from coppice.kernels.cpu.layer.matmul.float_products import float_kernels
from coppice.kernels.cpu.layer.matmul.group_products import group_kernels
from coppice.kernels.cpu.layer.matmul.int8_products import panel_kernels
from coppice.kernels.cpu.program import instructions
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.layers import Linear
from coppice.runtime.model.linear.eight_bit import Int8Linear
from coppice.runtime.model.linear.grouped import Int4Linear
from coppice.runtime.transformers.attention import LayerFacts, PagedStep, running
from coppice.runtime.transformers.network import Network
from coppice.runtime.transformers.program.lower import Lowering
from coppice.runtime.transformers.program.record import Unrecorded, record

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.matmul.float_panels import PackedFloat
    from coppice.kernels.cpu.layer.matmul.row_blocks import Panels

_log = logging.getLogger(__name__)

# Numbers of rows to record: a size that occurs in a model's own shapes could not be told from rows.
_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43)
# Rows of the passes that are compared before a program is used, and their pages.
_TRIED, _PAGE = (1, 5), 4
# Numbers of scratch that are kept from step to step, 16 MB.
_KEPT = 1 << 22
# Consecutive steps in which the threads did not run at the same time, before one thread does all.
_PATIENCE = 10


class CompiledNetwork:
    """The passes of ``network``, whose weights are complete and packed, and are not moved.

    Raises ``Unrecorded`` with the reason for a model that programs cannot run.
    """

    def __init__(
        self,
        config: ModelConfig,
        facts: Sequence[LayerFacts],
        network: Network,
        attention: CpuBackend,
        run: ModuleType,
    ) -> None:
        self._config, self._backend, self._run = config, attention, run
        self._windows = tuple(dict.fromkeys(each.sliding_window for each in facts))
        if len(self._windows) > 2:
            raise Unrecorded(f"layers have {len(self._windows)} windows")
        if len({(each.scale, each.softcap) for each in facts}) > 1:
            raise Unrecorded("layers differ in the scale or bound of attention")
        recording = record(network, _rows_for(config, network), config.head_dim, config.vocab_size)
        lowering = Lowering(recording, facts, config.head_dim, self._windows)
        self._early, self._kept = lowering.early, lowering.kept
        self._inputs = lowering.inputs
        self._panels = _panels_of(lowering.products)
        self._program = instructions.Program(
            np.stack(lowering.code.lines),
            np.array(lowering.code.numbers, np.float32),
            lowering.width,
            config.num_heads,
            np.unique([each.in_features for each in _packed(lowering.products)]),
            run.tasks_address(False),
            False,
        )
        self._scratch = np.empty(0, np.float32)
        self._caches: tuple[list[LayerCache], np.ndarray] | None = None
        self._threads_apart = 0
        self._try_out(facts, network)

    @torch.inference_mode()
    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Sequence[LayerCache],
        prepared: Any,
    ) -> torch.Tensor:
        """The last states of all rows; arguments are those of ``Decoder.hidden_states``.

        Raises ``IndexError`` for a slot that the cache does not have.
        """
        config, rows = self._config, len(token_ids)
        inputs = self._early.run(token_ids, positions)
        out = torch.empty(rows, config.hidden_size)
        numbers = self._program.width * rows
        scratch = self._scratch
        if len(scratch) < numbers:
            scratch = np.empty(numbers, np.float32)
            if numbers <= _KEPT:
                self._scratch = scratch
        plan = prepared.plan
        num_slots = len(kv[0].k) * plan.page_size
        step = instructions.Run(
            rows,
            np.array([each.data_ptr() for each in (*inputs, out)], np.int64),
            slots.numpy(),
            self._addresses(kv, plan.page_size),
            num_slots,
        )
        schedules = [
            self._backend.schedule(
                prepared, window, config.num_heads, config.num_kv_heads, config.head_dim
            )
            for window in self._windows
        ]
        first, *others = (
            items_of(
                schedule,
                plan,
                kv_heads=config.num_kv_heads,
                dim=config.head_dim,
                scale=config.attention_scale,
                window=window,
                softcap=config.attention_softcap,
            )
            for schedule, window in zip(schedules, self._windows, strict=True)
        )
        good, together = self._run.run_program(
            self._run.run_members.address,
            self._program,
            self._panels,
            step,
            scratch,
            first,
            *others or [first],
            max(schedule.tree.num_partials for schedule in schedules),
            prepared.num_threads if self._threads_apart < _PATIENCE else 1,
        )
        if not good:
            raise IndexError(f"slots must be from 0 to {num_slots - 1}, got {slots}")
        self._threads_apart = 0 if together else self._threads_apart + 1
        return out

    def _addresses(self, kv: Sequence[LayerCache], page_size: int) -> np.ndarray:
        config = self._config
        if self._caches is not None and self._caches[0] == list(kv):  # the same objects
            return self._caches[1]
        shape = (len(kv[0].k), page_size, config.num_kv_heads, config.head_dim)
        for layer in kv:
            for each in (layer.k, layer.v):
                if (
                    each.shape != shape
                    or each.dtype != kv[0].k.dtype
                    or each.dtype not in (torch.float32, torch.bfloat16)
                    or not each.is_contiguous()
                ):
                    raise ValueError(
                        f"kv has a cache of {each.dtype} {tuple(each.shape)}, strides "
                        f"{each.stride()}; it must be torch.float32, or torch.bfloat16 in all "
                        f"layers, contiguous {shape}"
                    )
        half = kv[0].k.dtype == torch.bfloat16
        self._program = self._program._replace(attention=self._run.tasks_address(half), half=half)
        addresses = np.array([[each.k.data_ptr(), each.v.data_ptr()] for each in kv], np.int64)
        self._caches = list(kv), addresses
        return addresses

    @torch.inference_mode()
    def _try_out(self, facts: Sequence[LayerFacts], network: Network) -> None:
        """Compares passes with the model's own, of one row and of several."""
        config = self._config
        shape = (2, _PAGE, config.num_kv_heads, config.head_dim)
        for rows in _TRIED:
            upto, length, table, pages = (
                np.array(each, np.int32) for each in ([0, rows], [rows], [0, 2], [1, 0])
            )
            plan = AttentionPlan(_PAGE, upto, length, table, pages)
            places = torch.arange(rows) % config.max_position
            tokens = (torch.arange(rows) * 7 + 3) % config.vocab_size
            slots = (torch.arange(rows) + _PAGE) % (2 * _PAGE)
            results = []
            for ours in (False, True):
                kv = [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in facts]
                prepared = self._backend.prepare(plan)
                if ours:
                    results.append(self.hidden_states(tokens, places, slots, kv, prepared))
                    continue
                running.step = PagedStep(facts, slots, kv, self._backend, prepared)
                try:
                    results.append(network.states(tokens, places))
                finally:
                    running.step = None
            theirs, mine = results
            apart = float((theirs - mine).abs().max())
            if not apart <= 2e-3 * float(theirs.abs().max()):
                raise Unrecorded(f"its results differ from the model's own by {apart:.2g}")
        self._caches = None


def _rows_for(config: ModelConfig, network: Network) -> int:
    sizes = {size for each in network.parameters() for size in each.shape}
    sizes |= {size for each in network.buffers() for size in each.shape}
    sizes |= {module.packed.in_features for module in network.modules()
              if isinstance(module, Linear) and module.packed is not None}  # fmt: skip
    sizes |= {config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size}
    for prime in _PRIMES:
        if all(size % prime for size in sizes):
            return prime
    raise Unrecorded("no number of rows differs from all sizes of the model")


def _packed(products: Sequence[Linear]) -> list[Any]:
    return [each.packed for each in products]


def _panels_of(products: Sequence[Linear]) -> Panels:
    """The compiled products that read the panels of all these weights."""
    if len({type(each) for each in products}) != 1:
        raise Unrecorded("its products are of several kinds, or it has none")
    if isinstance(products[0], Int8Linear | Int4Linear):
        kernels = panel_kernels() if isinstance(products[0], Int8Linear) else group_kernels()
        assert kernels is not None
        return cast("Panels", kernels.product())
    kinds = {cast("PackedFloat", each.packed).kind for each in products}
    floats = float_kernels()
    if floats is None or len(kinds) != 1:
        raise Unrecorded("its weights are of several types")
    return cast("Panels", floats.product(kinds.pop()))


def compile_network(
    config: ModelConfig,
    facts: Sequence[LayerFacts],
    network: Network,
    attention: AttentionBackend,
) -> CompiledNetwork | None:
    """The compiled pass; None, and a line in the log, where the model or the device has none."""
    if not isinstance(attention, CpuBackend) or not attention.compiles(
        config.num_heads, config.num_kv_heads
    ):
        return None
    try:
        from coppice.kernels.cpu.program import run

        return CompiledNetwork(config, facts, network, attention, run)
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        reason = str(error) if isinstance(error, Unrecorded) else f"{type(error).__name__}: {error}"
        _log.info("transformers' %s runs operation by operation: %s", config.architecture, reason)
        return None

"""The layers of a decoder as one compiled call, for a CPU.

``kernels/cpu/layer/stack.py`` runs all layers of a step at once. It takes the addresses of weights
and caches: they are gathered here, once, and the tensors are kept alive.
"""

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
from coppice.kernels.schedule.cpu import CpuSchedule, build_cpu_schedule, cpu_cost_model
from coppice.runtime.model.decoder import CompiledLayers, Decoder, DecoderLayer
from coppice.runtime.model.experts import ExpertMixture
from coppice.runtime.model.layers import Linear, Sum
from coppice.runtime.model.linear.eight_bit import Int8Linear
from coppice.runtime.model.linear.grouped import Int4Linear
from coppice.runtime.runner.implementation import Model

if TYPE_CHECKING:
    from coppice.kernels.cpu.layer.matmul.float_panels import PackedFloat
    from coppice.kernels.cpu.layer.matmul.row_blocks import Panels

_log = logging.getLogger(__name__)

# Consecutive steps in which the threads did not run at the same time, before one thread does all.
_PATIENCE = 10


class LayerStack(CompiledLayers):
    """All layers of ``decoder``, whose weights are complete and packed, and are not moved."""

    def __init__(self, decoder: Decoder, attention: CpuBackend, layers: ModuleType) -> None:
        self._backend = attention
        self._layers = layers
        self._threads_apart = 0
        config = decoder.config
        self._config = config
        self._windows = tuple(dict.fromkeys(config.sliding_windows))
        self._panels = _panels_of(cast("DecoderLayer", decoder.layers[0]).qkv)
        weights = np.zeros((config.num_layers + 1, len(layers.COLUMNS)), np.int64)
        self._kept: list[Any] = []
        for row, layer in enumerate(decoder.layers):
            for column, name in enumerate(layers.COLUMNS):
                weights[row, column] = self._column(cast("DecoderLayer", layer), name)
        weights[-1, 0] = self._address(decoder, "norm")
        kinds = [[self._windows.index(each.sliding_window), each.rope] for each in config.layers]
        self._model = layers.Model(
            weights,
            np.array(kinds, np.int64),
            config.num_heads,
            0 if all(each.experts for each in config.layers) else config.intermediate_size,
            config.activation == "gelu_tanh",
            np.float32(config.rms_norm_eps),
            np.float32(config.residual_scale),
            layers.tasks_address(False),
            False,
            self._ranks(decoder),
        )
        self._mixture = self._mixture_of(decoder)
        self._caches: tuple[list[LayerCache], np.ndarray] | None = None
        self._compile()

    def _ranks(self, decoder: Decoder) -> np.ndarray:
        """What the call needs to meet other ranks; no numbers for a model that is not divided."""
        memory, share = decoder.group.memory, decoder.share
        self._memory = memory
        if memory is None:
            return np.empty(0, np.int64)
        dim = share.whole.head_dim
        widths = share.whole.num_heads * dim, share.whole.num_kv_heads * dim
        memory.fields[-3:] = (*widths, share.first_of_kv)
        return memory.fields

    def _mixture_of(self, decoder: Decoder) -> Any:
        """What the layers with experts have in common."""
        for layer in cast("Sequence[DecoderLayer]", decoder.layers):
            if layer.experts is not None:
                from coppice.kernels.cpu.layer import experts_numba  # compiled when imported

                spec, router = layer.experts.spec, _panels_of(layer.experts.router)
                alpha, limit = spec.gate or (0.0, 0.0)
                return self._layers.Mixture(
                    experts_numba.run_experts.address, router, spec.count, spec.chosen, spec.inner,
                    spec.normalised, np.float32(alpha), np.float32(limit),
                )  # fmt: skip
        return self._layers.Mixture(
            0, self._panels, 0, 0, 0, False, np.float32(0), np.float32(0)
        )  # fmt: skip

    def _column(self, layer: DecoderLayer, name: str) -> int:
        """The address of what a column names, in a layer; 0 where it has none."""
        if name == "sinks":
            return 0 if layer.sinks is None else self._kept_address(layer.sinks)
        if name.startswith("router"):
            return 0 if layer.experts is None else self._address(layer.experts, name)
        if name == "experts":
            return 0 if layer.experts is None else self._table(layer.experts)
        if layer.experts is not None and name.startswith(("gate_up", "down")):
            return 0
        return self._address(layer, name)

    def _table(self, mixture: ExpertMixture) -> int:
        """The address of a table with the addresses of all experts' weights."""
        table = np.zeros((mixture.spec.count, self._layers.EXPERT_COLUMNS), np.int64)
        names = [name + part for name in ("gate_up", "down") for part in ("", "_scale", "_bias")]
        for row, expert in enumerate(mixture.experts):
            table[row] = [self._address(expert, name) for name in names]
        self._kept.append(table)
        return int(table.ctypes.data)

    def _kept_address(self, tensor: torch.Tensor) -> int:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _address(self, owner: Any, name: str) -> int:
        """The address of what a column names: the weight, scale or bias of a module; 0 for none."""
        owned, _, part = (
            name.rpartition("_") if name.endswith(("_scale", "_bias")) else (name, "", "")
        )
        module = getattr(owner, owned)
        if module is None or isinstance(module, Sum):
            return 0
        if isinstance(module, Linear) and not part:
            assert module.packed is not None
            self._kept.append(module.packed)
            return module.packed.address
        tensor = getattr(
            module, {"scale": "weight_scale", "bias": "bias"}.get(part, "weight"), None
        )
        return 0 if tensor is None else self._kept_address(tensor)

    def hidden_states(
        self,
        x: torch.Tensor,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        slots: torch.Tensor,
        kv: Sequence[LayerCache],
        prepared: Any,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``CompiledLayers``; overwrites ``x``.

        Raises ``IndexError`` for a slot that the cache does not have, and ``ValueError`` for caches
        that do not fit the model and the plan.
        """
        if logit_rows is None:
            logit_rows = torch.arange(len(x))
        config = self._config
        page_size = prepared.plan.page_size
        known = self._caches is not None and self._caches[0] == list(kv)  # the same objects
        if not known or kv[0].k.shape[1] != page_size:
            self._caches = list(kv), self._addresses(kv, page_size)
        assert self._caches is not None
        pages = len(kv[0].k)
        schedules = [
            self._backend.schedule(
                prepared, window, config.num_heads, config.num_kv_heads, config.head_dim
            )
            for window in self._windows
        ]
        out = torch.empty(len(logit_rows), config.hidden_size)
        good = self._call(
            self._caches[1],
            pages,
            x,
            angles,
            slots,
            logit_rows,
            prepared.num_threads if self._threads_apart < _PATIENCE else 1,
            schedules,
            prepared.plan,
            out,
        )
        if self._memory is not None:
            self._memory.check()
        if not good:
            raise IndexError(f"slots must be from 0 to {pages * page_size - 1}, got {slots}")
        return out

    def _addresses(self, kv: Sequence[LayerCache], page_size: int) -> np.ndarray:
        config = self._config
        if len(kv) != config.num_layers:
            raise ValueError(f"kv has caches of {len(kv)} layers; it must have {config.num_layers}")
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
        self._model = self._model._replace(attention=self._layers.tasks_address(half), half=half)
        addresses = [[layer.k.data_ptr(), layer.v.data_ptr()] for layer in kv]
        return np.array(addresses, np.int64)

    def _call(
        self,
        caches: np.ndarray,
        pages: int,
        x: torch.Tensor,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        slots: torch.Tensor,
        logit_rows: torch.Tensor,
        threads: int,
        schedules: Sequence[CpuSchedule],
        plan: AttentionPlan,
        out: torch.Tensor,
    ) -> bool:
        config = self._config
        shape = (len(angles), len(x), config.head_dim)
        cos, sin = (
            torch.stack(parts) if len(parts) > 1 else parts[0]
            for parts in zip(*angles, strict=True)
        )
        step = self._layers.Step(
            x.numpy(),
            cos.reshape(shape).numpy(),
            sin.reshape(shape).numpy(),
            slots.numpy(),
            logit_rows.numpy(),
            caches,
            pages * plan.page_size,
            out.numpy(),
        )
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
        partials = max(schedule.tree.num_partials for schedule in schedules)
        good, together = self._layers.run_layers(
            self._layers.run_members.address,
            self._model,
            self._mixture,
            self._panels,
            step,
            first,
            *others or [first],
            partials,
            threads,
        )
        if self._threads_apart < _PATIENCE:
            self._threads_apart = 0 if together else self._threads_apart + 1
            if self._threads_apart == _PATIENCE:
                _log.warning(
                    "layers run on one thread from now on: numba's threads did not run at the same "
                    "time, %d steps in a row",
                    _PATIENCE,
                )
        return bool(good)

    def _compile(self) -> None:
        """Compiles the call, or loads it from numba's cache, by a call with no layers."""
        one, upto = np.ones(1, np.int32), np.array([0, 1], np.int32)
        plan = AttentionPlan(1, upto, one, upto, one - 1)
        model = cpu_cost_model(
            self._config.num_heads,
            self._config.num_kv_heads,
            self._config.head_dim,
            lanes=1,
            most_lanes=self._config.num_heads,
            keys=1,
            threads=1,
        )
        place = torch.zeros(1, dtype=torch.int64)
        x, angle = torch.zeros(1, self._config.hidden_size), torch.zeros(1, self._config.head_dim)
        self._call(
            np.empty((0, 2), np.int64),
            1,
            x,
            [(angle, angle)] * len(self._config.ropes),
            place,
            place,
            1,
            [build_cpu_schedule(plan, None, model)] * len(self._windows),
            plan,
            torch.empty_like(x),
        )


def _panels_of(linear: Linear) -> Panels:
    """The compiled products that read the panels of a packed projection."""
    if isinstance(linear, Int8Linear | Int4Linear):
        kernels = panel_kernels() if isinstance(linear, Int8Linear) else group_kernels()
        assert kernels is not None
        return cast("Panels", kernels.product())
    kernels = float_kernels()
    assert kernels is not None
    return cast("Panels", kernels.product(cast("PackedFloat", linear.packed).kind))


def compile_layers(decoder: Decoder, attention: AttentionBackend) -> LayerStack | None:
    """The compiled layers; None if the compiled call does not support them or the backend."""
    config = decoder.config
    if not isinstance(attention, CpuBackend) or not attention.compiles(
        config.num_heads, config.num_kv_heads
    ):
        return None
    linears = [m for layer in decoder.layers for m in layer.modules() if isinstance(m, Linear)]
    if any(each.packed is None for each in linears) or not config.fits_one_call:
        return None
    if decoder.group.size > 1 and decoder.group.memory is None:
        return None
    try:
        from coppice.kernels.cpu.layer import stack

        return LayerStack(decoder, attention, stack)
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        _log.info("layers run operation by operation: %s: %s", type(error).__name__, error)
        return None


def compile_model(model: Model, attention: AttentionBackend) -> None:
    """Lets the layers of a model, whose weights are packed, run as one call where they can."""
    if isinstance(model, Decoder):
        model.compiled = compile_layers(model, attention)
    else:
        model.compiled = model.one_call(attention)

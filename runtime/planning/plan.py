"""The plan of a model on a device: what it takes, what fits, and how fast it can decode at most."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.runtime.model.config import DTYPE_NAMES, ModelConfig
from coppice.runtime.model.parallel.division import check_division, share_of
from coppice.runtime.planning.cache import (
    model_token_bytes,
    pages_each,
    reserved_waste,
    sequences_that_fit,
    window_tokens,
)
from coppice.runtime.planning.formats import format_bytes
from coppice.runtime.planning.numbers import Numbers, count
from coppice.runtime.planning.steps import Rates, StepSizes, step_sizes
from coppice.runtime.planning.stored import Stored
from coppice.runtime.planning.weights import WeightBytes, weight_bytes

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
assert tuple(_ITEMSIZE) == DTYPE_NAMES
_UNKNOWN = Stored(None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned. Raises ValueError that names the option, its value and what is allowed.

    Attributes:
        device_memory: bytes of the device; None: only what is needed is planned.
        fraction: of the memory that the weights leave, the KV cache's part.
        kv_cache_memory: bytes of the KV cache, instead of that part.
        memory_bandwidth: bytes a second that the device reads.
        product_rate: FLOP a second of its products in 16 bits.
        users: sequences at the same time, of ``context`` tokens each, the first ``shared`` alike.
        max_model_len: tokens that a place for the longest sequence reserves; None: the model's.
        dtype, kv_cache_dtype, quantization, page_size: as the engine's options; "auto" is the type
            that the config declares.
        tensor_parallel_size: devices among which the model is divided; memory and bandwidth are
            those of each.
    """

    device_memory: int | None = None
    fraction: float = 0.9
    kv_cache_memory: int | None = None
    memory_bandwidth: int | None = None
    product_rate: int | None = None
    users: int = 64
    context: int | None = None
    shared: int = 0
    max_model_len: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    page_size: int = 16
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("users", "page_size", "tensor_parallel_size", "context", "max_model_len",
                     "device_memory", "kv_cache_memory", "memory_bandwidth",
                     "product_rate"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"kv_cache_memory_fraction must be above 0 and at most 1, got {self.fraction!r}"
            )
        for name, allowed in (
            ("dtype", ("auto", *DTYPE_NAMES)),
            ("kv_cache_dtype", ("auto", "float32", "bfloat16", "fp8")),
            ("quantization", (None, "int8", "int4", "fp8")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, allowed))}, "
                    f"got {getattr(self, name)!r}"
                )


@dataclass(frozen=True, slots=True)
class Needs:
    """One way of keeping the KV of all users.

    ``pages`` and ``bytes`` are what the users take; ``fit`` how many sequences fit, None where the
    memory is not known; ``waste`` the share of these bytes that holds no token.
    """

    bytes: int
    fit: int | None
    waste: float
    pages: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What came out. Bytes are bytes; rates are tokens a second at most, None without bandwidth.

    ``window_bytes``: KV of a sequence that is older than its layer's window; a decoding step does
    not read it, and it is kept.
    ``draft_weights``, ``draft_token_bytes``: of the draft model, None and 0 without one; its cache
    has as many pages, and ``cache_bytes``, ``pages`` and what users take are of both.
    ``numbers`` are the whole model's; weights and KV are those of each device.
    ``stored``: how the checkpoint is stored. ``cpu_weights``: where a CPU keeps it as int8 or int4
    without being asked, what it takes there. ``cpu_formats``: what a CPU keeps of each of
    ``FORMATS``. ``step``: the most sequences and tokens of a step by default on such a GPU, None
    where its memory or rates are not known. ``alone`` and ``together``: the rates of one sequence,
    and of all users together.
    """

    options: PlanOptions
    model: ModelConfig
    dtype: str
    context: int
    longest: int
    numbers: Numbers
    weights: WeightBytes
    token_bytes: int
    page_bytes: int
    cache_bytes: int | None
    pages: int | None
    reserved: Needs
    paged: Needs
    shared: Needs
    window_bytes: int
    alone: float | None
    together: float | None
    stored: Stored
    cpu_weights: WeightBytes | None
    cpu_formats: dict[str, int]
    step: StepSizes | None
    draft_weights: WeightBytes | None = None
    draft_token_bytes: int = 0


def largest_part(model: ModelConfig, size: int) -> ModelConfig:
    """What the rank has that needs most memory."""
    parts = [share_of(model, rank, size).part for rank in range(size)]
    return max(parts, key=lambda part: (part.num_kv_heads, count(part).total))


def _step(
    part: ModelConfig, numbers: Numbers, options: PlanOptions, itemsize: int
) -> StepSizes | None:
    memory, bandwidth = options.device_memory, options.memory_bandwidth
    if memory is None or bandwidth is None or options.product_rate is None:
        return None
    return step_sizes(part, numbers, Rates(memory, bandwidth, options.product_rate), itemsize)


def make_plan(
    model: ModelConfig,
    options: PlanOptions,
    stored: Stored = _UNKNOWN,
    draft: ModelConfig | None = None,
) -> Plan:
    """The plan of a model that is ``stored`` so, or of the largest part of one that is divided.

    Args:
        draft: the model that proposes drafts. That both have the same tokens is not looked at.

    Raises ValueError for lengths that the model does not have, for memory that is too little, and
    for a draft model of a model that is divided.
    """
    longest = options.max_model_len or model.max_position
    context = options.context or min(8192, longest)
    if longest > model.max_position:
        raise ValueError(
            f"max_model_len must be at most {model.max_position}, the model's own, got {longest}"
        )
    if context > longest:
        raise ValueError(f"context must be at most max_model_len, {longest}, got {context}")
    if not 0 <= options.shared <= context:
        raise ValueError(f"shared must be from 0 to context, {context}, got {options.shared}")
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    itemsize = _ITEMSIZE[dtype]
    check_division(model, options.tensor_parallel_size)
    numbers, part = count(model), largest_part(model, options.tensor_parallel_size)
    own = count(part)
    weights = weight_bytes(own, itemsize, options.quantization)
    on_cpu = None
    if stored.on_cpu is not None and options.quantization is None:
        on_cpu = weight_bytes(own, itemsize, stored.on_cpu)
    kept = {"fp8": 1, "bfloat16": 2, "float32": 4}.get(options.kv_cache_dtype)
    each, size, users = model_token_bytes(part, kept or itemsize), options.page_size, options.users
    draft_weights, draft_each = _draft_bytes(draft, options, kept)
    cache = options.kv_cache_memory
    if cache is None and options.device_memory is not None:
        taken = weights.total + (0 if draft_weights is None else draft_weights.total)
        left = options.device_memory - taken
        if left <= 0:
            raise ValueError(
                f"device_memory is {options.device_memory:,} bytes, and the weights take "
                f"{taken:,}: give a larger one, or a smaller dtype or quantization"
            )
        cache = int(left * options.fraction)
    page, both = each * size, (each + draft_each) * size
    pages = None if cache is None else cache // both

    def paged(shared: int) -> Needs:
        common, own = pages_each(context, shared, size)
        taken = common + users * own
        tokens = common * size + users * (context - common * size)
        fit = None if pages is None else sequences_that_fit(pages, common, own)
        return Needs(taken * both, fit, 1 - tokens / (taken * size), taken)

    whole = longest * (each + draft_each)
    reserved = Needs(
        users * whole, None if cache is None else cache // whole, reserved_waste(longest, context)
    )
    old = window_tokens(model.sliding_windows, context) * each // model.num_layers
    alone = together = None
    if options.memory_bandwidth is not None:
        read = context * each - old
        alone = options.memory_bandwidth / (weights.read + read)
        # Shared tokens within windows are read once for all, and so are at least these weights.
        newest = [context - window for window in model.sliding_windows if window is not None]
        unread = sum(min(options.shared, max(0, first)) for first in newest)
        common = (options.shared * model.num_layers - unread) * (each // model.num_layers)
        step = weights.read + common + users * (read - common)
        together = users * options.memory_bandwidth / step
    return Plan(
        options, model, dtype, context, longest, numbers, weights, each, page, cache, pages,
        reserved, paged(0), paged(options.shared), old, alone, together, stored, on_cpu,
        format_bytes(numbers, model.dtype), _step(part, own, options, itemsize),
        draft_weights, draft_each,
    )  # fmt: skip


def _draft_bytes(
    draft: ModelConfig | None, options: PlanOptions, kept: int | None
) -> tuple[WeightBytes | None, int]:
    """What a draft model's weights and the KV of a token take."""
    if draft is None:
        return None, 0
    if options.tensor_parallel_size > 1:
        raise ValueError(
            f"draft_model must be left out with tensor_parallel_size {options.tensor_parallel_size}"
        )
    itemsize = _ITEMSIZE[draft.dtype if options.dtype == "auto" else options.dtype]
    weights = weight_bytes(count(draft), itemsize, options.quantization)
    return weights, model_token_bytes(draft, kept or itemsize)

"""Writes down the operations of a forward pass, while a model computes a few rows.

transformers' models are Python, and most of a decode step's time with them is Python's and torch's,
not the arithmetic's. But the operations are the same in every step, but for the number of rows. So
a pass is recorded once: torch shows every operation that it dispatches, and the parts that are ours
(products, norms, gates, attention) are noted as single operations.

An operation is *early* if it depends on no such part of ours: embeddings, positions and their
rotation. Early ones are kept as torch's operations, to be run again in each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from coppice.runtime.model.layers import Linear, SiluMul
from coppice.runtime.transformers.adopt import Rows
from coppice.runtime.transformers.attention import LonelyStep, running
from coppice.runtime.transformers.fuse import AnyNorm
from coppice.runtime.transformers.network import Network


class Unrecorded(Exception):
    """The pass cannot be recorded; the message is the reason."""


@dataclass(slots=True)
class Noted:
    """An operation: ``name`` of torch's, or of ours; its inputs and the tensors it returned.

    ``function`` is called to run it again, and ``module`` is the part of ours.
    """

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    outs: list[torch.Tensor]
    function: Any = None
    module: nn.Module | None = None


@dataclass(slots=True)
class Recording:
    """A pass over ``rows`` rows: its ``tokens`` and ``positions``, operations, and result.

    ``early`` and ``late`` are operations in order; views are noted only if they are early.
    ``late`` operations write memory that no early one made. ``origins`` are the storages of early
    results, by their addresses, with the place in ``early`` of the operation that made them, or
    -1 and -2 for tokens and positions.
    """

    rows: int
    tokens: torch.Tensor
    positions: torch.Tensor
    early: list[Noted] = field(default_factory=list)
    late: list[Noted] = field(default_factory=list)
    made: set[int] = field(default_factory=set)
    origins: dict[int, int] = field(default_factory=dict)
    result: torch.Tensor | None = None
    kept: list[Any] = field(default_factory=list)


def storage(tensor: torch.Tensor) -> int:
    """What tensors that are views of each other have in common."""
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    """Notes what torch dispatches."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        self.note(str(func._schema.name).removeprefix("aten::"), args, options, out, function=func)
        return out

    def note(
        self,
        name: str,
        args: tuple[Any, ...],
        options: dict[str, Any],
        out: Any,
        function: Any = None,
        module: nn.Module | None = None,
    ) -> None:
        """Notes an operation of torch, or of ours if it has no ``function``."""
        recording = self.recording
        read = {storage(each) for each in _tensors((args, options))}
        outs = list(_tensors(out))
        recording.kept += [args, options, outs]
        late = bool(read & recording.made) or (function is None and not isinstance(module, Rows))
        early = bool(read & set(recording.origins))
        if not outs:
            if late or early:
                raise Unrecorded(f"{name} makes a choice that depends on numbers")
            return
        if not late:
            if not early:
                return  # constant: its result is kept as it is
            if function is not None and function._schema.is_mutable:
                raise Unrecorded(f"{name} overwrites what depends on tokens or positions")
            place = len(recording.early)
            recording.early.append(Noted(name, args, options, outs, function, module))
            for each in outs:
                recording.origins.setdefault(storage(each), place)
            return
        if function is not None and function._schema.is_mutable:
            if not set(map(storage, outs)) <= recording.made:
                raise Unrecorded(f"{name} overwrites what is not its layer's own")
        elif all(storage(each) in read for each in outs):
            return  # a view
        if len(outs) > 1 and name != "native_layer_norm":
            raise Unrecorded(f"{name} has several results")
        recording.made.add(storage(outs[0]))
        recording.late.append(Noted(name, args, options, outs, function, module))


class _Step(LonelyStep):
    """Attention that is noted, of rows that each see themselves alone."""

    def __init__(self, recorder: _Recorder, width: int) -> None:
        self._recorder, self._width = recorder, width

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``PagedStep.attend``."""
        with _disable_current_modes():
            groups = query.shape[1] // value.shape[1]
            alone = value[0].transpose(0, 1).repeat_interleave(groups, dim=1)
            out = alone.new_zeros(*alone.shape[:2], self._width)
            out[..., : alone.shape[-1]] = alone
        inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
        self._recorder.note("attend", inputs, {}, out)
        return out[..., : value.shape[-1]]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@contextmanager
def _noted(network: Network, recorder: _Recorder) -> Iterator[None]:
    """Notes the parts that are ours as operations."""
    changed: list[nn.Module] = []

    def watch(module: nn.Module, name: str) -> None:
        inner = module.forward

        def noted(x: torch.Tensor) -> torch.Tensor:
            with _disable_current_modes():
                out = cast("torch.Tensor", inner(x))
            recorder.note(name, (x,), {}, out, module=module)
            return out

        module.forward = noted
        changed.append(module)

    names = {AnyNorm: "rms_norm", SiluMul: "gate", Rows: "rows"}
    for module in network.base.modules():
        if isinstance(module, Linear):
            watch(module, "product")
        elif type(module) in names:
            watch(module, names[type(module)])
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def record(network: Network, rows: int, width: int, vocabulary: int) -> Recording:
    """A pass of ``network`` over ``rows`` rows, whose pages have heads of ``width`` numbers.

    Raises ``Unrecorded`` if an operation depends on the numbers that it computes, or overwrites
    what others may read.
    """
    tokens = torch.arange(1, rows + 1) % vocabulary
    recording = Recording(rows, tokens, torch.arange(rows))
    recording.origins = {storage(recording.tokens): -1, storage(recording.positions): -2}
    recorder = _Recorder(recording)
    running.step = _Step(recorder, width)
    try:
        with torch.no_grad(), _noted(network, recorder), recorder:
            recording.result = network.states(recording.tokens, recording.positions)
    except (RuntimeError, TypeError, ValueError) as error:
        raise Unrecorded(f"{type(error).__name__}: {error}") from error
    finally:
        running.step = None
    return recording

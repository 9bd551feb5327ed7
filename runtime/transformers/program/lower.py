"""Translates a recorded pass to a program for ``kernels.cpu.program``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from coppice.kernels.cpu.program import instructions as ops
from coppice.kernels.cpu.program.instructions import CONSTANT, INPUT, SCRATCH, A, B, C
from coppice.runtime.model.layers import Linear
from coppice.runtime.transformers.attention import LayerFacts
from coppice.runtime.transformers.fuse import AnyNorm
from coppice.runtime.transformers.program.early import Early
from coppice.runtime.transformers.program.record import Noted, Recording, Unrecorded, storage
from coppice.runtime.transformers.program.views import Buffer, Code, View, rows_dim, view

_TWO = {"add": ops.ADD, "sub": ops.SUB, "mul": ops.MUL, "div": ops.DIV}
_ONE = {
    "silu": ops.SILU, "relu": ops.RELU, "sigmoid": ops.SIGMOID, "tanh": ops.TANH, "exp": ops.EXP,
    "rsqrt": ops.RSQRT, "sqrt": ops.SQRT, "abs": ops.ABS, "clone": ops.COPY, "_to_copy": ops.COPY,
}  # fmt: skip
_HUGE = 3e38


class Lowering:
    """The program of ``recording``, for calls of attention with these ``facts``.

    ``heads`` are of ``width`` numbers, and ``windows`` the kinds of layers.

    Attributes:
        code: the instructions; ``assign`` has been called.
        early: what makes their inputs.
        inputs: the number of inputs; the result of the pass is the last one.
        width: numbers of a row in scratch.
        products: the linear layers, in the order of the products.
        kept: what lies at the addresses in the program.

    Raises ``Unrecorded`` with the reason for a pass that programs cannot do.
    """

    def __init__(
        self,
        recording: Recording,
        facts: Sequence[LayerFacts],
        width: int,
        windows: Sequence[int | None],
    ) -> None:
        self._recording, self._facts, self._width = recording, facts, width
        self._windows = windows
        self.code, self.early = Code(), Early(recording)
        self.products: list[Linear] = []
        self.kept: list[Any] = []
        self._buffers: dict[int, Buffer] = {}
        self._calls = 0
        self._results: dict[int, Buffer] = {}
        for noted in recording.late:
            self._lower(noted)
        if self._calls != len(facts):
            raise Unrecorded(f"{self._calls} calls of attention were noted, not {len(facts)}")
        assert recording.result is not None
        self.inputs = len(self._results)
        numbers = recording.result.shape[-1]
        out = Buffer(INPUT, numbers, numbers, self.inputs)
        self._one(ops.COPY, recording.result, View(out, 0, [1]))
        self.inputs += 1
        self.width = self.code.assign()

    def _lower(self, noted: Noted) -> None:
        name, args, out = noted.name, noted.args, noted.outs[0]
        if out.dtype != torch.float32:
            raise Unrecorded(f"{name} returns {out.dtype}")
        ours: dict[str, Callable[[Noted], None]] = {
            "product": self._product, "rms_norm": self._norm, "gate": self._gate,
            "attend": self._attention, "native_layer_norm": self._layer_norm, "mean": self._sum,
            "sum": self._sum, "cat": self._cat, "stack": self._cat, "copy_": self._copy,
        }  # fmt: skip
        if name in ours:
            ours[name](noted)
            return
        name = name.removesuffix("_")
        if name in _TWO and isinstance(args[0], torch.Tensor):
            other = args[1]
            if noted.options.get("alpha", 1) != 1 or noted.options.get("rounding_mode"):
                raise Unrecorded(f"{name} has options")
            if isinstance(other, torch.Tensor):
                self._two(_TWO[name], args[0], other, out)
            else:
                line = {"add": (1.0, other), "sub": (1.0, -other), "mul": (other, 0.0)}
                p, q = line[name] if name in line else (1 / other, 0.0)
                self._one(ops.LINE, args[0], out, (p, q))
        elif name == "rsub" and not isinstance(args[1], torch.Tensor):
            self._one(ops.LINE, args[0], out, (-1.0, args[1]))
        elif name == "neg":
            self._one(ops.LINE, args[0], out, (-1.0, 0.0))
        elif name == "pow" and isinstance(args[1], int | float):
            self._one(ops.POWER, args[0], out, (float(args[1]), 0.0))
        elif name == "square":
            self._one(ops.POWER, args[0], out, (2.0, 0.0))
        elif name == "reciprocal":
            self._one(ops.POWER, args[0], out, (-1.0, 0.0))
        elif name in ("new_empty", "empty_like"):
            self._out(out)
        elif name in ("new_zeros", "zeros_like"):
            self._fill(out)
        elif name in ("clamp", "clamp_min", "clamp_max", "hardtanh"):
            self._clamp(noted)
        elif name == "gelu":
            exact = noted.options.get("approximate", "none") == "none"
            self._one(ops.GELU if exact else ops.GELU_TANH, args[0], out)
        elif name in _ONE:
            self._one(_ONE[name], args[0], out)
        else:
            raise Unrecorded(f"{name} is not among a program's operations")

    # -- operands --------------------------------------------------------------------------------

    def _view(self, tensor: torch.Tensor) -> View:
        """What an operation reads."""
        rows, place = self._recording.rows, storage(tensor)
        if place not in self._buffers:
            if place in self._recording.origins:
                self._buffers[place] = self._input(place)
            else:
                if tensor.dtype != torch.float32:
                    raise Unrecorded(f"a constant is {tensor.dtype}")
                self.kept.append(tensor)
                return view(tensor, Buffer(CONSTANT, 0, 0, tensor.data_ptr()), rows)
        return view(tensor, self._buffers[place], rows)

    def _input(self, place: int) -> Buffer:
        """The rows that an early operation makes, whose storage is ``place``."""
        origin = self._recording.origins[place]
        if origin < 0:
            raise Unrecorded("a program reads the tokens or positions themselves")
        noted = self._recording.early[origin]
        made = next(each for each in noted.outs if storage(each) == place)
        dim = rows_dim(made, self._recording.rows)
        if made.dtype != torch.float32:
            raise Unrecorded(f"{noted.name} makes an input that is not one of float32")
        numbers = made.numel() // made.shape[dim]
        if not made.movedim(dim, 0).is_contiguous():
            raise Unrecorded(f"the rows of {noted.name} are not apart")
        number = self.early.want(made, dim)
        return self._results.setdefault(number, Buffer(INPUT, numbers, numbers, number))

    def _out(self, tensor: torch.Tensor) -> View:
        """What an operation writes: a new buffer, or what it overwrites."""
        rows, place = self._recording.rows, storage(tensor)
        if place not in self._buffers:
            dim = rows_dim(tensor, rows)
            if tensor.untyped_storage().nbytes() != 4 * tensor.numel():
                raise Unrecorded("a result has gaps")
            numbers = tensor.numel() // rows
            self._buffers[place] = Buffer(SCRATCH, numbers, tensor.stride(dim))
        return view(tensor, self._buffers[place], rows)

    def _sizes(self, tensor: torch.Tensor) -> list[int]:
        dim = rows_dim(tensor, self._recording.rows)
        return [size for at, size in enumerate(tensor.shape) if at != dim]

    def _emit(
        self,
        op: int,
        sizes: list[int],
        operands: dict[int, View],
        numbers: tuple[float, float] = (0.0, 0.0),
        more: Sequence[tuple[int, int]] = (),
        *,
        whole: bool = False,
    ) -> None:
        """Instructions for an operation of these sizes; ``whole``: it works on whole last lines."""
        shape: list[int] = []
        strides: list[list[int]] = []
        for at, size in enumerate(sizes):
            mine = [each.strides[at] for each in operands.values()]
            last = at == len(sizes) - 1
            if size == 1 and not (whole and last):
                continue
            if shape and not (whole and last) and all(
                upper == lower * size for upper, lower in zip(strides[-1], mine, strict=True)
            ):  # fmt: skip
                shape[-1], strides[-1] = shape[-1] * size, mine
            else:
                shape.append(size)
                strides.append(mine)
        while len(shape) < 2:
            shape.insert(0, 1)
            strides.insert(0, [0] * len(operands))
        self._loops(op, shape, strides, operands, [0] * len(operands), numbers, more)

    def _loops(
        self,
        op: int,
        shape: list[int],
        strides: list[list[int]],
        operands: dict[int, View],
        firsts: list[int],
        numbers: tuple[float, float],
        more: Sequence[tuple[int, int]],
    ) -> None:
        if len(shape) > 2:
            if shape[0] > 8:
                raise Unrecorded(f"an operation has sizes {shape}")
            for i in range(shape[0]):
                moved = [
                    first + i * stride for first, stride in zip(firsts, strides[0], strict=True)
                ]
                self._loops(op, shape[1:], strides[1:], operands, moved, numbers, more)
            return
        placed = {
            column: (each.buffer, each.first + first, s1, s2)
            for (column, each), first, s1, s2 in zip(
                operands.items(), firsts, strides[0], strides[1], strict=True
            )
        }
        self.code.add(op, (shape[0], shape[1]), placed, more, numbers)

    def _one(
        self,
        op: int,
        a: torch.Tensor,
        out: torch.Tensor | View,
        numbers: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        to = self._out(out) if isinstance(out, torch.Tensor) else out
        sizes = self._sizes(out if isinstance(out, torch.Tensor) else a)
        read = self._view(a.expand(out.shape) if isinstance(out, torch.Tensor) else a)
        if len(to.strides) != len(read.strides):  # leading dimensions of one
            to = View(to.buffer, to.first, [0] * (len(sizes) - len(to.strides)) + to.strides)
        self._emit(op, sizes, {A: read, ops.OUT: to}, numbers)

    def _two(self, op: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        reads = self._view(a.expand(out.shape)), self._view(b.expand(out.shape))
        self._emit(op, self._sizes(out), {A: reads[0], B: reads[1], ops.OUT: self._out(out)})

    def _whole_rows(self, tensor: torch.Tensor, width: int = 0) -> Buffer:
        """A buffer with the rows of ``tensor`` alone, its last dimension filled to ``width``."""
        read, sizes = self._view(tensor), self._sizes(tensor)
        width = width or sizes[-1]
        strides: list[int] = []
        numbers = 1
        for size in reversed(sizes):
            strides.insert(0, numbers)
            numbers *= width if len(strides) == 1 else size
        same = all(
            mine == other or size == 1
            for mine, other, size in zip(read.strides, strides, sizes, strict=True)
        )
        buffer = read.buffer
        if same and not read.first and buffer.width == numbers and buffer.space != CONSTANT:
            return buffer
        made = Buffer(SCRATCH, numbers, numbers)
        if width > sizes[-1]:
            self.code.add(ops.FILL, (1, numbers), {ops.OUT: (made, 0, 0, 1)})
        self._emit(ops.COPY, sizes, {A: read, ops.OUT: View(made, 0, strides)})
        return made

    # -- operations ------------------------------------------------------------------------------

    def _product(self, noted: Noted) -> None:
        linear = cast("Linear", noted.module)
        if linear.packed is None:
            raise Unrecorded("a product's weight is not packed")
        x, out = noted.args[0], noted.outs[0]
        read, made = self._whole_rows(x), self._out(out).buffer
        scale, bias = getattr(linear, "weight_scale", None), linear.bias
        self.kept += [linear.packed, scale, bias]
        self.products.append(linear)
        self.code.add(
            ops.PRODUCT,
            (x.shape[-1], out.shape[-1]),
            {A: (read, 0, 0, 1), ops.OUT: (made, 0, 0, 1)},
            [
                (ops.W0, linear.packed.address),
                (ops.W1, 0 if scale is None else scale.data_ptr()),
                (ops.W2, 0 if bias is None else bias.data_ptr()),
            ],
        )

    def _attention(self, noted: Noted) -> None:
        facts, number = self._facts[self._calls], self._calls
        self._calls += 1
        query, key, value = (each[0].transpose(0, 1) for each in noted.args[:3])
        buffers = [self._whole_rows(each, self._width) for each in (query, key, value)]
        made = self._out(noted.outs[0]).buffer
        sinks = noted.args[3].contiguous() if len(noted.args) > 3 else None
        if sinks is not None and sinks.dtype != torch.float32:
            raise Unrecorded(f"sinks are {sinks.dtype}")
        self.kept.append(sinks)
        operands = dict(zip((A, B, C, ops.OUT), [*buffers, made], strict=True))
        self.code.add(
            ops.ATTEND,
            (facts.num_kv_heads, self._width),
            {column: (each, 0, 0, 1) for column, each in operands.items()},
            [
                (ops.W0, 0 if sinks is None else sinks.data_ptr()),
                (ops.W1, number),
                (ops.W2, self._windows.index(facts.sliding_window)),
            ],
        )

    def _norm(self, noted: Noted) -> None:
        norm = cast("AnyNorm", noted.module)
        out = noted.outs[0]
        read, made = self._view(noted.args[0]), self._out(out)
        weight = self._view(norm.weight.data.expand(out.shape))
        self._lines(ops.RMS_NORM, out, {A: read, B: weight, ops.OUT: made}, norm.eps)

    def _layer_norm(self, noted: Noted) -> None:
        x, shape, weight, bias, eps = noted.args
        if len(shape) != 1:
            raise Unrecorded("a norm is over several dimensions")
        out = noted.outs[0]
        operands = {A: self._view(x), ops.OUT: self._out(out)}
        if weight is not None:
            operands[B] = self._view(weight.expand(out.shape))
        if bias is not None:
            operands[C] = self._view(bias.expand(out.shape))
        more = [(ops.W0, int(weight is not None)), (ops.W1, int(bias is not None))]
        self._lines(ops.LAYER_NORM, out, operands, eps, more)

    def _lines(
        self,
        op: int,
        tensor: torch.Tensor,
        operands: dict[int, View],
        number: float,
        more: Sequence[tuple[int, int]] = (),
    ) -> None:
        """An operation on whole lines, which reads and writes numbers side by side."""
        if any(each.strides[-1] != 1 for each in operands.values()):
            raise Unrecorded("the numbers of a norm are apart")
        self._emit(op, self._sizes(tensor), operands, (number, 0.0), more, whole=True)

    def _gate(self, noted: Noted) -> None:
        out = noted.outs[0]
        read, made = self._whole_rows(noted.args[0]), self._out(out).buffer
        self.code.add(ops.GATE, (1, out.shape[-1]), {A: (read, 0, 0, 1), ops.OUT: (made, 0, 0, 1)})

    def _sum(self, noted: Noted) -> None:
        x, dims = noted.args[:2]
        if not isinstance(dims, list | tuple) or [d % x.dim() for d in dims] != [x.dim() - 1]:
            raise Unrecorded(f"{noted.name} is not over the last dimension")
        out = noted.outs[0]
        kept = out if out.dim() == x.dim() else out.unsqueeze(-1)
        made = self._out(out)
        made = View(
            made.buffer, made.first, [*view(kept, made.buffer, self._recording.rows).strides]
        )
        share = 1.0 / x.shape[-1] if noted.name == "mean" else 1.0
        self._emit(
            ops.SUM, self._sizes(x), {A: self._view(x), ops.OUT: made}, (share, 0.0), whole=True
        )

    def _cat(self, noted: Noted) -> None:
        parts = noted.args[0]
        out = noted.outs[0]
        dim = (noted.args[1] if len(noted.args) > 1 else noted.options.get("dim", 0)) % out.dim()
        self._out(out)
        at = 0
        for part in parts:
            if noted.name == "stack":
                self._one(ops.COPY, part, out.select(dim, at))
                at += 1
            elif part.shape[dim]:
                self._one(ops.COPY, part, out.narrow(dim, at, part.shape[dim]))
                at += part.shape[dim]

    def _fill(self, out: torch.Tensor) -> None:
        self._emit(ops.FILL, self._sizes(out), {ops.OUT: self._out(out)})

    def _copy(self, noted: Noted) -> None:
        self._one(ops.COPY, noted.args[1], noted.outs[0])

    def _clamp(self, noted: Noted) -> None:
        values = list(noted.args[1:])
        low = noted.options.get("min", values[0] if values else None)
        high = noted.options.get("max", values[1] if len(values) > 1 else None)
        if noted.name.startswith("clamp_max"):
            low, high = None, noted.options.get("max", values[0] if values else None)
        if noted.name.startswith("hardtanh"):
            low, high = (values + [-1.0, 1.0][len(values) :])[:2]
        for each in (low, high):
            if isinstance(each, torch.Tensor):
                raise Unrecorded("clamp has bounds of their own for each number")
        bounds = (-_HUGE if low is None else low, _HUGE if high is None else high)
        self._one(ops.CLAMP, noted.args[0], noted.outs[0], bounds)

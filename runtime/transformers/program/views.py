"""Where the numbers of a row lie: a traced tensor's strides, without those of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from coppice.kernels.cpu.program.instructions import COLUMNS, CONSTANT, OP, SCRATCH
from coppice.runtime.transformers.program.record import Unrecorded


@dataclass(slots=True, eq=False)
class Buffer:
    """What one operation leaves: ``width`` numbers of each row.

    ``stride`` is that of rows in the tensor that was traced, where they may lie within other
    dimensions. ``base`` is the number of an input, the address of a constant, or, once assigned,
    the place in scratch. ``first_use`` and ``last_use`` are those of instructions.
    """

    space: int
    width: int
    stride: int
    base: int = -1
    first_use: int = -1
    last_use: int = -1


@dataclass(slots=True)
class View:
    """Numbers of a row of ``buffer`` from ``first`` on, with a stride for each of some sizes."""

    buffer: Buffer
    first: int
    strides: list[int]


def rows_dim(tensor: torch.Tensor, rows: int) -> int:
    """The dimension of rows; ``rows`` is the size of no other one."""
    found = [i for i, size in enumerate(tensor.shape) if size == rows]
    if len(found) != 1 or any(size % rows == 0 and size != rows for size in tensor.shape):
        raise Unrecorded(f"rows are not one dimension of {tuple(tensor.shape)}")
    return found[0]


def view(tensor: torch.Tensor, buffer: Buffer, rows: int) -> View:
    """A tensor that lies in ``buffer``, seen without its rows."""
    strides, seen = [], False
    if buffer.space == CONSTANT:
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if size % rows == 0:
                if stride:
                    raise Unrecorded("a constant has a number for each row")
            else:
                strides.append(stride)
        return View(buffer, 0, strides)
    unit = buffer.stride

    def inside(number: int) -> int:
        """A place or stride in the traced tensor as one in a row."""
        outer, rest = divmod(number, rows * unit)
        if rest >= unit:
            raise Unrecorded("rows are mixed")
        return outer * unit + rest

    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == rows and stride == unit and not seen:
            seen = True
        elif size == 1:
            strides.append(0)
        else:
            strides.append(inside(stride))
    if not seen:
        raise Unrecorded("a tensor has no rows")
    return View(buffer, inside(int(tensor.storage_offset())), strides)


@dataclass(slots=True)
class Code:
    """The instructions, while they are written, and buffers of scratch."""

    lines: list[np.ndarray] = field(default_factory=list)
    numbers: list[tuple[float, float]] = field(default_factory=list)
    #: The operands' buffers of each line: the column, and the buffer.
    owners: list[list[tuple[int, Buffer]]] = field(default_factory=list)

    def add(
        self,
        op: int,
        sizes: tuple[int, int],
        operands: dict[int, tuple[Buffer, int, int, int]],
        more: Sequence[tuple[int, int]] = (),
        numbers: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """One instruction; an operand is its buffer, first place and two strides, by its column."""
        line = np.zeros(COLUMNS, np.int64)
        line[OP], line[OP + 1 : OP + 3] = op, sizes
        for column, (buffer, first, s1, s2) in operands.items():
            width = 0 if buffer.space == CONSTANT else buffer.width
            line[column : column + 6] = buffer.space, buffer.base, width, first, s1, s2
            if buffer.first_use < 0:
                buffer.first_use = len(self.lines)
            buffer.last_use = len(self.lines)
        for column, number in more:
            line[column] = number
        self.lines.append(line)
        self.numbers.append(numbers)
        self.owners.append([(column, each[0]) for column, each in operands.items()])

    def assign(self) -> int:
        """Gives buffers their place in scratch; returns the numbers of a row in it.

        A buffer takes the place of one of the same width that nothing reads any more: of one of
        another width it would share a row's numbers with another row, which another thread works.
        """
        free: dict[int, list[int]] = {}
        total = 0
        for at, (line, owners) in enumerate(zip(self.lines, self.owners, strict=True)):
            mine = {id(buffer): buffer for _, buffer in owners if buffer.space == SCRATCH}
            for buffer in mine.values():
                if buffer.base < 0:
                    if free.get(buffer.width):
                        buffer.base = free[buffer.width].pop()
                    else:
                        buffer.base, total = total, total + buffer.width
            for column, buffer in owners:
                line[column + 1] = buffer.base
            for buffer in mine.values():
                if buffer.last_use == at:
                    free.setdefault(buffer.width, []).append(buffer.base)
        return total

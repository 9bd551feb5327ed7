"""The tensors of a checkpoint by name, each read when it is asked for: what all readers offer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from coppice.kernels.cpu.layer.matmul.grouped import Grouped
from coppice.runtime.model.parallel.cut import Cut


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a tensor before it is read.

    Attributes:
        shape, dtype: those of the tensor that `read` returns.
        file: that holds it.
        stored: how it is stored there, where that differs from its dtype, such as "Q4_K".
        size: its bytes in the file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    size: int
    stored: str | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether it has more than one dimension, as nearly all bytes of a model do."""
        return len(self.shape) > 1


class TensorSource(ABC):
    """Tensors by name.

    A reader keeps no tensor that it has returned, so that a caller who drops each before it asks
    for the next has one at a time in memory. Readers compose: one may decode what another reads.

    Attributes:
        headers: of all tensors, by name, in the order in which reading them is fast.
        stored: what quantised weights are stored as, for people; None: they are not quantised.
        eight_bit: whether the checkpoint was made to be computed with in 8 bits.
        four_bit: whether most of its numbers are weights of 4 bits in groups.
    """

    headers: Mapping[str, Header]
    stored: str | None = None
    eight_bit: bool = False
    four_bit: bool = False

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name, in main memory.

        Raises ValueError that names file and tensor where the file does not hold what its header
        says.
        """

    def read_part(self, name: str, cut: Cut) -> torch.Tensor:
        """A part of it; readers that can read no more than that."""
        return cut.of(self.read(name))

    def read_grouped(self, name: str) -> Grouped | None:
        """The same as it is stored, for products of weights in groups; None where it is not so."""
        return None

    @property
    def half_type(self) -> torch.dtype | None:
        """The 16-bit type of all plain matrices; None if they differ or have more bits."""
        found = {each.dtype for each in self.headers.values() if each.is_matrix}
        found.discard(torch.uint8)
        half = next(iter(found)) if len(found) == 1 else None
        return half if half in (torch.bfloat16, torch.float16) else None


def in_order(
    headers: Mapping[str, Header], *, first: str, last: str
) -> Iterator[tuple[str, Header]]:
    """All tensors file by file.

    The file that holds tensor `first` comes first, and of each file tensor `last` last: a tied head
    that is stored all the same is compared with the embedding, which must have been read.
    """
    first_file = headers[first].file if first in headers else None
    files = dict.fromkeys(header.file for header in headers.values())
    for file in sorted(files, key=lambda f: (f != first_file, f)):
        held = [(name, header) for name, header in headers.items() if header.file == file]
        yield from sorted(held, key=lambda pair: pair[0] == last)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a plain tensor."""
    return math.prod(shape) * dtype.itemsize

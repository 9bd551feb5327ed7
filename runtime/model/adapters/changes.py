"""What the adapters of a step add to projections: rows grouped by adapter, products on each device.

A row of adapter i gets ``y += B_i (A_i x)``, the scale included in B. On a CPU in float32 one
compiled call does it for all rows of a projection, whatever their adapters, and a row's result does
not depend on the others. Elsewhere the matrices of all adapters of the step lie side by side: two
dense products make all of ``A_i x`` of all rows and add ``B_i`` of them, after each row's results
of others' matrices were set to zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from coppice.kernels.cpu.layer.matmul.low_rank import low_rank_kernels
from coppice.runtime.model.adapters.matrices import Piece
from coppice.runtime.model.decoder import Change


@dataclass(frozen=True, slots=True, eq=False)
class ActingRows:
    """The rows of a step on which adapters act, those of one adapter together.

    Attributes:
        rows: int64 ``[R]``, each once.
        adapters: the adapters' numbers, each once.
        groups: int64 ``[R]``: the place of each row's adapter in ``adapters``, ascending.
    """

    rows: np.ndarray
    adapters: tuple[int, ...]
    groups: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray) -> ActingRows | None:
        """The rows of ``numbers``, an adapter for each row; -1 for none. None if none acts."""
        order = np.argsort(numbers, kind="stable")
        rows = order[int(np.searchsorted(numbers[order], 0)) :]
        if not len(rows):
            return None
        adapters, groups = np.unique(numbers[rows], return_inverse=True)
        return cls(rows.astype(np.int64), tuple(adapters.tolist()), groups.astype(np.int64))

    def among(self, chosen: np.ndarray) -> ActingRows:
        """The same for a batch of the rows ``chosen``, int64, in their order."""
        group_of = np.full(int(max(self.rows.max(), chosen.max(initial=0))) + 1, -1)
        group_of[self.rows] = self.groups
        groups = group_of[chosen]
        rows = np.flatnonzero(groups >= 0)
        order = np.argsort(groups[rows], kind="stable")
        return ActingRows(rows[order], self.adapters, groups[rows][order])


class Products(Protocol):
    """How matrices are applied on one device."""

    def prepare(self, pieces: Sequence[Piece], widths: Mapping[str, int]) -> Any:
        """An adapter's matrices; ``widths`` are those of the projections' results."""

    def moved(self, matrices: Any, device: torch.device) -> Any:
        """What ``prepare`` made, on another device, where no step may use it."""

    def step(self, adapters: Sequence[Any], numbers: tuple[int, ...]) -> StepProducts:
        """The products of a step with these adapters, which ``prepare`` made, and their numbers."""


class StepProducts(Protocol):
    """The products of one step."""

    def add(
        self, layer: int, projection: str, x: torch.Tensor, y: torch.Tensor, rows: ActingRows
    ) -> torch.Tensor:
        """``y [T, N]``, to which each row's product of ``x [T, K]`` was added in place."""


class StepChanges:
    """The changes of one step, for ``Decoder.hidden_states``."""

    def __init__(self, products: StepProducts, rows: ActingRows, chosen: ActingRows) -> None:
        """`rows` are those of the step, `chosen` those of the rows that go on to the logits."""
        self._products, self._rows, self._chosen = products, rows, chosen

    def of_layer(self, layer: int, *, chosen: bool = False) -> Change:
        """See ``Changes``."""
        return partial(self._add, layer, self._chosen if chosen else self._rows)

    def _add(
        self, layer: int, rows: ActingRows, projection: str, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        return self._products.add(layer, projection, x, y, rows) if len(rows.rows) else y


class _Kept:
    """What was made last for a few sets of adapters: most steps have the set of the one before."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def of(self, numbers: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """What ``make`` returns for the adapters of these numbers, which are never used again."""
        if numbers not in self._made:
            while len(self._made) >= self._most:
                self._made.popitem(last=False)
            self._made[numbers] = make()
        self._made.move_to_end(numbers)
        return self._made[numbers]


Place: TypeAlias = tuple[int, str]
"""A layer and a projection."""

# -- on a CPU, compiled --------------------------------------------------------------------------


class RowProducts:
    """Compiled products of float32 rows on a CPU; ``kernels`` is ``low_rank_numba``."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._steps = _Kept(16)  # tables of addresses

    def prepare(
        self, pieces: Sequence[Piece], widths: Mapping[str, int]
    ) -> Mapping[Place, list[Piece]]:
        """The pieces by layer and projection, their ranks filled up with zeros."""
        places: dict[Place, list[Piece]] = {}
        for piece in pieces:
            more = -len(piece.down) % self._kernels.RANKS
            filled = Piece(
                piece.part,
                F.pad(piece.down, (0, 0, 0, more)).contiguous(),
                F.pad(piece.up, (0, 0, 0, more)).contiguous(),
            )
            places.setdefault((piece.part.layer, piece.part.projection), []).append(filled)
        return places

    def moved(self, matrices: Any, device: torch.device) -> Any:
        """The same: they are in main memory anyway."""
        return matrices

    def step(
        self, adapters: Sequence[Mapping[Place, list[Piece]]], numbers: tuple[int, ...]
    ) -> RowStep:
        step: RowStep = self._steps.of(numbers, lambda: RowStep(self._kernels, adapters))
        return step


class RowStep:
    """The addresses of all matrices of some adapters, by layer and projection."""

    def __init__(self, kernels: Any, adapters: Sequence[Mapping[Place, list[Piece]]]) -> None:
        self._kernels = kernels
        self._tables: dict[Place, Any] = {}
        for place in dict.fromkeys(place for each in adapters for place in each):
            groups = [
                [
                    [p.down.data_ptr(), p.up.data_ptr(), len(p.down), p.part.first, p.part.outputs]
                    for p in each.get(place, ())
                ]
                for each in adapters
            ]
            self._tables[place] = kernels.piece_table(groups)

    def add(
        self, layer: int, projection: str, x: torch.Tensor, y: torch.Tensor, rows: ActingRows
    ) -> torch.Tensor:
        """See ``StepProducts``. The caller keeps the matrices."""
        if (found := self._tables.get((layer, projection))) is not None:
            self._kernels.add_low_rank(
                x.contiguous().numpy(), y.numpy(), rows.rows, rows.groups, found,
                torch.get_num_threads(),
            )  # fmt: skip
        return y


# -- anywhere, by torch --------------------------------------------------------------------------


class DenseProducts:
    """Dense products in the model's type, on any device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._place: dict[str, Any] = {"dtype": dtype, "device": device}
        self._steps = _Kept(1)  # a copy of the matrices

    def prepare(
        self, pieces: Sequence[Piece], widths: Mapping[str, int]
    ) -> Mapping[Place, tuple[torch.Tensor, torch.Tensor]]:
        """For each projection A of all its parts, ``[ranks, K]``, and B, ``[ranks, N]``.

        B has zeros in the columns of other parts.
        """
        grouped: dict[Place, list[Piece]] = {}
        for piece in pieces:
            grouped.setdefault((piece.part.layer, piece.part.projection), []).append(piece)
        stacked = {}
        for place, parts in grouped.items():
            down = torch.cat([each.down for each in parts])
            up = torch.zeros(len(down), widths[place[1]])
            at = 0
            for each in parts:
                part, rank = each.part, len(each.down)
                up[at : at + rank, part.first : part.first + part.outputs] = each.up
                at += rank
            stacked[place] = down.to(**self._place), up.to(**self._place)
        return stacked

    def moved(
        self, matrices: Mapping[Place, tuple[torch.Tensor, torch.Tensor]], device: torch.device
    ) -> Mapping[Place, tuple[torch.Tensor, torch.Tensor]]:
        """Copies on the device."""
        self._steps = _Kept(1)
        return {place: (a.to(device), b.to(device)) for place, (a, b) in matrices.items()}

    def step(
        self,
        adapters: Sequence[Mapping[Place, tuple[torch.Tensor, torch.Tensor]]],
        numbers: tuple[int, ...],
    ) -> DenseStep:
        step: DenseStep = self._steps.of(
            numbers, lambda: DenseStep(adapters, self._place["device"])
        )
        return step


class DenseStep:
    """The matrices of some adapters side by side, by layer and projection."""

    def __init__(
        self,
        adapters: Sequence[Mapping[Place, tuple[torch.Tensor, torch.Tensor]]],
        device: torch.device,
    ) -> None:
        self._device = device
        self._groups: tuple[ActingRows, torch.Tensor] | None = None
        self._matrices: dict[Place, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for place in dict.fromkeys(place for each in adapters for place in each):
            found = [each.get(place) for each in adapters]
            owner = np.repeat(
                np.arange(len(found)), [0 if each is None else len(each[0]) for each in found]
            )
            self._matrices[place] = (
                torch.cat([each[0] for each in found if each is not None]),
                torch.cat([each[1] for each in found if each is not None]),
                torch.from_numpy(owner).to(device),
            )

    def add(
        self, layer: int, projection: str, x: torch.Tensor, y: torch.Tensor, rows: ActingRows
    ) -> torch.Tensor:
        """See ``StepProducts``."""
        found = self._matrices.get((layer, projection))
        if found is None:
            return y
        down, up, owner = found
        others = self._group_of(rows, len(x))[:, None] != owner
        return y.add_((x @ down.t()).masked_fill_(others, 0) @ up)

    def _group_of(self, rows: ActingRows, count: int) -> torch.Tensor:
        """The group of each of ``count`` rows on the device, -1 for none; the last is kept."""
        if self._groups is None or self._groups[0] is not rows:
            group_of = np.full(count, -1, np.int64)
            group_of[rows.rows] = rows.groups
            self._groups = rows, torch.from_numpy(group_of).to(self._device)
        return self._groups[1]


def products_for(dtype: torch.dtype, device: torch.device) -> Products:
    """The fastest products for a model of that type on a device."""
    if device.type == "cpu" and dtype == torch.float32:
        kernels = low_rank_kernels()
        if kernels is not None:
            return RowProducts(kernels)
    return DenseProducts(dtype, device)

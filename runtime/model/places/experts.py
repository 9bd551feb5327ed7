"""Where tensors belong that hold all experts of a layer, plain or in MXFP4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from coppice.runtime.model.experts import Expert, ExpertMixture
from coppice.runtime.model.layers import DTYPES
from coppice.runtime.model.parallel.cut import Cut
from coppice.runtime.model.parallel.division import Share

# Numbers of MXFP4 that share a scale.
_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of a checkpoint belongs: its shape, and what copies it to the decoder.

    ``dtypes`` are the types that it may have. ``takes_groups``: ``fill`` also takes a ``Grouped``.
    ``cut`` is the part that ``fill`` takes, of a model that is divided among ranks; None: all.
    """

    shape: tuple[int, ...]
    fill: Callable[[Any], object]
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES.values())
    takes_groups: bool = False
    cut: Cut | None = None


def experts_in_one(
    mixture: ExpertMixture,
    names: tuple[str, str],
    hidden: int,
    share: Share,
    whole: int,
    *,
    stored: str | None,
) -> dict[str, Place]:
    """The tensors of all experts of a layer, as gpt-oss names and lays them.

    ``names`` are those of gate and up together, float ``[experts, hidden, 2 * inner]``, with a
    column of each in turn, and of down, ``[experts, inner, hidden]``; biases are ``[experts,
    2 * inner]`` and ``[experts, hidden]``. ``stored`` "mxfp4": the two are packed, see ``_packed``.
    ``whole`` is the experts' inner width, of which ``share`` has a part.
    """
    count, inner = mixture.spec.count, mixture.spec.inner
    experts = [cast(Expert, each) for each in mixture.experts]

    def gate_up(number: int, own: torch.Tensor) -> None:
        experts[number].gate_up.fill_weight(0, own[:, 0::2].t())
        experts[number].gate_up.fill_weight(inner, own[:, 1::2].t())

    def gate_up_bias(part: torch.Tensor) -> None:
        for expert, own in zip(experts, part, strict=True):
            expert.gate_up.fill_bias(0, own[0::2])
            expert.gate_up.fill_bias(inner, own[1::2])

    def down(number: int, own: torch.Tensor) -> None:
        experts[number].down.fill_weight(0, own.t())

    def each(fill: Callable[[int, torch.Tensor], object], part: torch.Tensor) -> None:
        for number, own in enumerate(part):
            fill(number, own)

    def down_bias(part: torch.Tensor) -> None:
        for expert, own in zip(experts, part, strict=True):
            expert.down.fill_bias(0, own if share.rank == 0 else torch.zeros_like(own))

    both, last = names
    own = share.inner(whole)
    pairs, some = (range(2 * own.start, 2 * own.stop),), (own,)
    alone = share.size == 1
    places = {
        f"{both}_bias": Place(
            (count, 2 * whole), gate_up_bias, cut=None if alone else Cut(1, pairs)
        ),
        f"{last}_bias": Place((count, hidden), down_bias),
    }
    if stored == "mxfp4":
        if own.start % _BLOCK or own.stop % _BLOCK:
            raise ValueError(
                f"tensor_parallel_size is {share.size}; the experts' inner width of {whole} can't "
                f"be divided by it into multiples of {_BLOCK}, the blocks of MXFP4"
            )
        blocks = (range(own.start // _BLOCK, own.stop // _BLOCK),)
        return (
            places
            | _packed(both, (count, 2 * whole, hidden), gate_up, None if alone else Cut(1, pairs))
            | _packed(last, (count, hidden, whole), down, None if alone else Cut(2, blocks))
        )
    return places | {
        both: Place(
            (count, hidden, 2 * whole), partial(each, gate_up), cut=None if alone else Cut(2, pairs)
        ),
        last: Place(
            (count, whole, hidden), partial(each, down), cut=None if alone else Cut(1, some)
        ),
    }


def _packed(
    name: str,
    shape: tuple[int, int, int],
    fill: Callable[[int, torch.Tensor], object],
    cut: Cut | None,
) -> dict[str, Place]:
    """A tensor in MXFP4 (Open Compute Project 2023): 32 numbers of 4 bits have a scale of 8.

    ``shape`` is that of its numbers, ``[experts, rows, columns]``. The two parts come one after the
    other; the first is kept until the other is there.
    """
    count, rows, columns = shape
    if columns % _BLOCK:
        raise ValueError(f"{name} has {columns} columns; MXFP4 needs a multiple of {_BLOCK}")
    parts: dict[str, torch.Tensor] = {}

    def take(part: str, tensor: torch.Tensor) -> None:
        parts[part] = tensor
        if len(parts) == 2:
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors

            packed = parts.pop("blocks"), parts.pop("scales")
            # One expert at a time: all of a layer, unpacked, take four times what is packed.
            for number, (blocks, scale) in enumerate(zip(*packed, strict=True)):
                fill(number, convert_moe_packed_tensors(blocks[None], scale[None])[0])

    shapes = {
        "blocks": (count, rows, columns // _BLOCK, 16),
        "scales": (count, rows, columns // _BLOCK),
    }
    return {
        f"{name}_{part}": Place(size, partial(take, part), (torch.uint8,), cut=cut)
        for part, size in shapes.items()
    }

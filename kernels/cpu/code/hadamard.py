"""Rows transformed so that a large number is spread over its neighbours, before they become levels.

In a trained model a few channels of a row are tens of times larger than the others. Levels are
fractions of a row's largest number, so these few cost all others their precision. A Hadamard
matrix, whose entries are 1 and -1, makes each number of a block a sum of all numbers of the block,
some of them negated, so that what one number had is spread evenly. This transform is linear and
keeps angles and lengths, up to a factor, so the product of a transformed row with a weight whose
rows were transformed likewise is the product itself. It needs no knowledge of the layers around a
product, and no examples of what will pass through it. Ashkboos et al. 2024 (QuaRot), section 3.
"""

from __future__ import annotations

import torch

#: Numbers of the longest block; none is shorter than ``SHORTEST``.
LONGEST = 512
SHORTEST = 16


def block_of(width: int) -> int:
    """Numbers of a block in rows of ``width``: the largest power of 2 that divides it, in bounds.

    1 where it would be shorter than ``SHORTEST``: such rows stay as they are.
    """
    block = min(width & -width, LONGEST)
    return block if block >= SHORTEST else 1


def transformed(x: torch.Tensor) -> torch.Tensor:
    """``x [..., W]`` float32 with each block times a Hadamard matrix, not scaled; O(W log block).

    The same additions in the same order as ``hadamard_numba``: equal bit for bit. Transformed
    twice it is ``x`` times ``block_of(W)``.
    """
    block, span = block_of(x.shape[-1]), 1
    while span < block:
        one, other = x.unflatten(-1, (-1, 2, span)).unbind(-2)
        x = torch.stack((one + other, one - other), -2).flatten(-3)
        span *= 2
    return x

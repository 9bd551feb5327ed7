"""Which kernels a launch takes, by the time that each would take: fa2, fa3, or our own.

**fa2** packs the query heads of a KV head with the rows, and splits long ranges of keys, but only
as long as its tiles are fewer than the programs that the chip holds. **fa3** is FlashInfer's way
for Hopper, with warp groups of their own for loads and products: faster, but each tile is of rows
of one query head, and no range of keys is split. So fa3 wins where many rows of few sequences fill
its tiles and the chip, as in the chunks of prompts; fa2 where few rows share keys. **Ours** split
any batch: where there are more sequences than programs, of very different lengths, fa2 waits for
the longest.

FlashInfer's persistent kernel (``BatchAttention``) would split such batches, too. It is not used:
its plan waits for all that is queued on the device, and it has no windows.

An H200 has confirmed `_FA3_RATE`; the other constants are estimates from the library's code.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from coppice.kernels.flashinfer.levels import Level
from coppice.kernels.schedule.cost import CostModel, best_split

#: What engines may ask for: fa3 where it is faster, nowhere, or wherever prompts are computed.
CHOICES = ("auto", "fa2", "fa3")

# Products of fa3 in the time of one of fa2, on as many multiprocessors: an H200 computes causal
# prompts of 8,192 rows in 1 / 1.71 of the time. Shah et al. 2024 find 1.5 to 2 times for contiguous
# keys.
_FA3_RATE = 1.7

_FA3_CAPABILITY = (9, 0)
_FA3_HEAD_DIMS = (64, 128, 256)

# Programs of fa2 on a multiprocessor, as FlashInfer's plan counts them; and an estimate of those of
# the decode wrapper's own kernel, of which it asks the driver.
_FA2_PROGRAMS = 2
_DECODE_PROGRAMS = 4

# Ours must be faster by this factor: both times are estimates.
_MARGIN = 1.25


def without_fa3(
    capability: tuple[int, int], head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> str | None:
    """Why fa3 cannot be used there; None if it can, provided that its kernels are built."""
    if capability != _FA3_CAPABILITY:
        major, minor = capability
        return f"it is for compute capability 9.0, and this is {major}.{minor}"
    if cache_dtype != dtype:
        return f"with queries in {dtype} it reads no cache of {cache_dtype}"
    if head_dim not in _FA3_HEAD_DIMS:
        return f"it has no heads of {head_dim}"
    return None


def prefers_fa3(level: Level, model: CostModel) -> bool:
    """Whether fa3 computes a level, of rows of several positions or sequences, in less time."""
    rows = np.diff(level.query_indptr).astype(np.int64)
    keys = level.kv_len.astype(np.int64)
    some = (rows > 0) & (keys > 0)
    if not some.any():
        return False
    rows, keys = rows[some], keys[some]
    # Of causal rows the first sees fewer keys; on average half of the rows are not seen.
    mean = keys - (rows - 1) / 2 if level.causal else keys.astype(float)

    packed = rows * model.group
    tile = _fa2_tile(int(packed.mean()), model.head_dim)
    tiles = -(-packed // tile)
    slots = _FA2_PROGRAMS * model.multiprocessors
    work = float((tiles * tile * mean).sum()) * model.kv_heads
    unsplit = int(tiles.sum()) * model.kv_heads >= slots
    longest = float(tile * keys.max()) if unsplit else 0.0
    fa2 = _FA2_PROGRAMS * max(work / slots, longest)

    tile = 192 if model.head_dim == 64 else 128
    work = float((-(-rows // tile) * tile * mean).sum()) * model.kv_heads * model.group
    fa3 = max(work / model.multiprocessors, float(tile * keys.max())) / _FA3_RATE
    return fa3 < fa2


def waits_for_the_longest(level: Level, model: CostModel) -> bool:
    """Whether our kernels read the keys of decoding sequences in much less time than FlashInfer's.

    These split nothing from some number of sequences on. O(sequences).
    """
    keys = np.maximum(level.kv_len.astype(np.int64), 1)
    cores = tensor_cores(model.group, eight_bits=model.key_bytes == 2 * model.head_dim)
    held = (_FA2_PROGRAMS if cores else _DECODE_PROGRAMS) * model.multiprocessors
    tiles = -(-model.group // _fa2_tile(model.group, model.head_dim)) if cores else 1
    programs = len(keys) * tiles * model.kv_heads
    if programs < held:
        return False
    waves = math.ceil(programs / held)
    walk = max(
        waves * (float(keys.mean()) + model.start_keys), float(keys.max()) + model.start_keys
    )
    theirs = walk * held * model.key_bytes
    ones = np.ones_like(keys)
    split, ours = best_split(keys, ones, model.tiles.few, model)
    pieces = -(-keys // split)
    if (pieces > 1).any():
        ours += model.merge_cost(int(pieces[pieces > 1].sum()))
    return theirs > _MARGIN * ours


def tensor_cores(group: int, *, eight_bits: bool) -> bool:
    """Whether decoding goes through fa2: it is faster there with several query heads a KV head."""
    return group >= 4 or eight_bits


def most_split(kv_heads: int, multiprocessors: int) -> int:
    """Sequences up to which fa2, and the decode wrapper's kernel, surely split."""
    return (_FA2_PROGRAMS * multiprocessors - 1) // kv_heads


def _fa2_tile(packed: int, head_dim: int) -> int:
    """Packed rows of a tile of fa2, by the mean of those of a group."""
    if packed > 64 and head_dim < 256:
        return 128
    return 64 if packed > 16 else 16

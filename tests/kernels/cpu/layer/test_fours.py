"""Products of bytes by each of the processor's instructions: exact, and the same by all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.kernels.cpu.code.hadamard import transformed
from coppice.kernels.cpu.code.processor import PATHS, features
from coppice.kernels.cpu.layer.matmul import group_products, int8_products
from coppice.kernels.cpu.layer.matmul.grouped import Grouped
from coppice.kernels.cpu.layer.rows import row_kernels

# Prints a digest of products of rows and weights with all levels that there are.
_PROGRAM = """
import hashlib
import torch
from coppice.kernels.cpu.layer.matmul import group_products, int8_products
from coppice.kernels.cpu.layer.matmul.grouped import rounded
rng = torch.Generator().manual_seed(1)
found = hashlib.sha256()
scale = torch.linspace(0.5, 1, 100)
for rows in (1, 2, 3, 4, 7, 8, 33):
    x = torch.randn(rows, 192, generator=rng)
    weight = torch.randint(-128, 128, (100, 192), generator=rng, dtype=torch.int8)
    packed = int8_products.pack(weight)
    assert packed is not None
    found.update(int8_products.multiply(x, packed, scale, scale).numpy().tobytes())
    for bits, group in ((4, 32), (4, 96), (8, 64)):
        made = rounded(torch.randn(100, 192, generator=rng), bits, group)
        packed = group_products.pack(made)
        assert packed is not None
        found.update(group_products.multiply(x, packed, scale, None).numpy().tobytes())
print(found.hexdigest())
"""


def _paths() -> list[str]:
    """Those that this processor has of both kinds, but for tiles, which take turns with others."""
    return [
        path
        for path, needed in PATHS["int4"].items()
        if path in PATHS["int8"] and path != "torch"
        if features().issuperset((*needed, *PATHS["int8"][path]))
    ]


@pytest.mark.skipif(len(_paths()) < 2, reason="this processor has one path, or none")
@pytest.mark.slow
def test_all_instructions_give_the_same_bits(tmp_path: Path) -> None:
    digests = {}
    # Elsewhere their code would take the place of what other tests have compiled.
    own = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for path in _paths():
        forced = own | {"COPPICE_CPU_PATHS": f"int8={path},int4={path}"}
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], env=forced, capture_output=True, text=True, check=True
        )
        digests[path] = done.stdout.strip()
    assert len(set(digests.values())) == 1, digests


@pytest.mark.skipif(int8_products.panel_kernels() is None, reason="without VNNI and AVX2")
def test_the_largest_levels_are_multiplied_exactly() -> None:
    """Sums of 16 bits would overflow: each product is the largest one, of either sign."""
    signs = torch.where(torch.arange(64) % 3 == 0, -1.0, 1.0)
    # Rows are transformed before they are rounded: twice gives what it was.
    x = transformed(torch.stack([torch.ones(64), -torch.ones(64), signs]))
    levels, peaks = row_kernels().quantize(x)
    assert set(levels.unique().tolist()) == {-127, 127}
    weight = torch.stack([torch.full((64,), -128), torch.full((64,), 127), 127 * signs.int()])
    packed = int8_products.pack(weight.to(torch.int8))
    assert packed is not None
    scale = torch.ones(3)
    expected = row_kernels().rescale((levels.long() @ weight.t()).int(), peaks, scale, None)
    torch.testing.assert_close(int8_products.multiply(x, packed, scale, None), expected)


@pytest.mark.skipif(group_products.group_kernels() is None, reason="without VNNI and AVX2")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128])
def test_the_largest_levels_in_groups_are_multiplied_exactly(bits: int, group: int) -> None:
    """Those of 4 bits are added in 16 bits, a block at a time."""
    most, inner = (1 << bits) - 1, 256
    levels = np.zeros((3, inner), np.uint8)
    levels[0] = most
    levels[1, ::2] = most
    stored = torch.from_numpy(levels)
    if bits == 4:
        fours = stored.unflatten(1, (-1, 2, 4))
        stored = (fours[:, :, 0] | (fours[:, :, 1] << 4)).flatten(1)
    ones = torch.ones(3, inner // group)
    weight = Grouped(stored, ones, torch.zeros_like(ones), bits)
    packed = group_products.pack(weight)
    assert packed is not None
    x = torch.stack([torch.full((inner,), 127.0), torch.full((inner,), -127.0)])
    got = group_products.multiply(x, packed, torch.ones(3), None)
    expected = x.numpy().astype(np.int64) @ levels.astype(np.int64).T
    assert np.array_equal(got.numpy().astype(np.int64), expected)

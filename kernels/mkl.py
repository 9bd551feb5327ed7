"""Matrix products of weights that are laid out beforehand, by the MKL that torch's build brings.

MKL otherwise copies a weight into its own layout in every product of more than two rows, which from
4 to 64 rows takes longer than the product: for all layers of a Llama of 135 million weights, 2.5
times less with 8 rows, 3.4 with 16, 2.8 with 32, 1.6 with 64, 1.3 with 256 and 1,024; as much with
one. These are MKL's own C functions (``cblas_sgemm_pack``, ``cblas_sgemm_compute``), which the
library of torch exports on x86; called by address, they serve Python and numba's compiled
functions alike.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

# The rows for which MKL lays out a weight. It takes the layout for any number, but chooses it by
# this one: packed for 16 or fewer it is up to 1.5 times slower above 16, and packed for 1,024 or
# more 1.4 times slower below.
_PACKED_FOR = 256

# cblas.h of MKL.
_ROW_MAJOR, _AS_IS, _TRANSPOSED, _PACKED, _MATRIX_B = 101, 111, 112, 151, 162
# Bytes; packed data lies relative to it, so that it may not be moved.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A float32 weight ``[out_features, in_features]`` in MKL's layout; ``memory`` keeps it."""

    out_features: int
    in_features: int
    address: int
    memory: torch.Tensor


@cache
def library() -> ctypes.CDLL | None:
    """torch's library with MKL's functions; None where it has none."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    int_, pointer = ctypes.c_int, ctypes.c_void_p
    try:
        found = ctypes.CDLL(str(path))
        found.cblas_sgemm_pack_get_size.restype = ctypes.c_size_t
        found.cblas_sgemm_pack_get_size.argtypes = [int_] * 4
        found.cblas_sgemm_pack.argtypes = [int_] * 6 + [ctypes.c_float, pointer, int_, pointer]
        found.cblas_sgemm_compute.argtypes = [int_] * 6 + [
            pointer,
            int_,
            pointer,
            int_,
            ctypes.c_float,
            pointer,
            int_,
        ]
        found.cblas_sgemm_pack.restype = found.cblas_sgemm_compute.restype = None
    except (OSError, AttributeError):  # another file name, or a build without MKL
        return None
    return found


def pack(weight: torch.Tensor) -> PackedWeight | None:
    """A float32 CPU weight ``[N, K]`` laid out; None where there is no MKL, or it gives otherwise.

    O(N K); the memory is ``N * K`` floats and some.
    """
    functions = library()
    if functions is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    rows, columns = weight.shape
    if not weight.numel():
        return None
    size = functions.cblas_sgemm_pack_get_size(_MATRIX_B, _PACKED_FOR, rows, columns)
    # MKL asks for up to nine times the weight (of 576 x 576) and writes about as much as the weight
    # has; pages that nobody writes take no memory.
    memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
    address = memory.data_ptr() + -memory.data_ptr() % _ALIGNMENT
    weight = weight.detach().contiguous()
    functions.cblas_sgemm_pack(
        _ROW_MAJOR, _MATRIX_B, _TRANSPOSED, _PACKED_FOR, rows, columns, 1.0, weight.data_ptr(),
        columns, address,
    )  # fmt: skip
    packed = PackedWeight(rows, columns, address, memory)
    x = torch.linspace(-1, 1, 3 * columns).view(3, -1)
    right = torch.allclose(multiply(x, packed), x @ weight.t(), rtol=1e-3, atol=1e-3)
    return packed if right else None


def multiply(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """``x [T, K] @ weight.T``, a new tensor ``[T, N]``; float32."""
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty(rows, weight.out_features)
    functions = library()
    assert functions is not None
    if rows:
        functions.cblas_sgemm_compute(
            _ROW_MAJOR, _AS_IS, _PACKED, rows, weight.out_features, columns, x.data_ptr(), columns,
            weight.address, columns, 0.0, out.data_ptr(), weight.out_features,
        )  # fmt: skip
    return out


def address_of(function: object) -> int:
    """Where a function of ``library`` lies."""
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address

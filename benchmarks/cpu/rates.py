"""How fast this machine reads memory and multiplies matrices.

    python benchmarks/cpu/rates.py [THREADS]

Prints one JSON object: bytes a second of reading, operations a second of float32, bfloat16 and int8
products. Each is the best of several tries.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes read a second, and operations a second (a multiply and an add are two)."""

    read: float
    float32: float
    bfloat16: float
    int8: float


def measure(threads: int, tries: int = 5) -> Rates:
    """Measures the rates, in about two seconds and 1 GiB; sets torch's number of threads."""
    import torch

    torch.set_num_threads(threads)

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(tries + 1):  # the first one warms up
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    # Larger than any cache. Read by a sum, and by a product with a vector, as in decoding.
    wide, vector = torch.ones(16_384, 16_384), torch.ones(16_384)
    read = wide.numel() * 4 / min(best(wide.sum), best(lambda: torch.mv(wide, vector)))

    rows, inner, columns = 2048, 1024, 4096
    a, b = torch.ones(rows, inner), torch.ones(columns, inner)
    out = torch.empty(rows, columns)
    float32 = 2 * rows * inner * columns / best(lambda: torch.mm(a, b.t(), out=out))
    a16, b16 = a.bfloat16(), b.bfloat16()
    bfloat16 = 2 * rows * inner * columns / best(lambda: torch.mm(a16, b16.t()))
    a8, b8 = a.to(torch.int8), b.to(torch.int8)
    int8 = 2 * rows * inner * columns / best(lambda: torch._int_mm(a8, b8.t()))
    return Rates(read, float32, bfloat16, int8)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 2))))

"""Products of weights on a CPU by number format, all in turn: what a step of so many rows costs.

    python benchmarks/products.py [--json FILE] [--quick] [--rounds N]

One JSON object a line. `ratio` is how many times faster a format is than float32: the median over
rounds of float32's time / its time (10th and 90th percentiles beside it); each round runs all
formats one after another, over more weights than caches hold. `paths` are the instructions that the
processor has for them. "int8 by torch" is the product where a processor has none of these, of up to
16 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common.harness import Rows, compare, machine, parser
from coppice.kernels.cpu.code.processor import PATHS, path_of
from coppice.kernels.cpu.code.threads import calm_waiting_threads
from coppice.kernels.cpu.layer.matmul import float_products, group_products, int8_products
from coppice.kernels.cpu.layer.matmul.grouped import rounded

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
OUTPUTS, INPUTS = 4096, 2048
_WEIGHTS = 6  # of that size
_BY_TORCH = "int8 by torch"
_MOST_BY_TORCH = 16  # rows: it takes seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    args = options.parse_args()
    calm_waiting_threads()
    weights = 2 if args.quick else _WEIGHTS
    formats = _formats([torch.randn(OUTPUTS, INPUTS) for _ in range(weights)])
    out, where = Rows(args.json), machine()
    paths = {kind: path_of(kind) for kind in PATHS}
    threads = torch.get_num_threads()
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        for rows in ROWS[::3] if args.quick else ROWS:
            x = torch.randn(rows, INPUTS)
            ways: dict[str, Callable[[], Any]] = {
                name: partial(product, x) for name, product in formats.items()
            }
            if rows > _MOST_BY_TORCH:
                del ways[_BY_TORCH]
            size = {"outputs": OUTPUTS, "inputs": INPUTS, "rows": rows}
            shape = {**size, "threads": count, "paths": paths}
            for row in compare("products", shape, ways, 3 if args.quick else args.rounds):
                out.add(**row, machine=where)


def _formats(
    weights: list[torch.Tensor],
) -> dict[str, Callable[[torch.Tensor], list[torch.Tensor]]]:
    """By name, the products of rows with all weights; those that this processor has."""
    scale = torch.ones(OUTPUTS)
    floats = [_packed(float_products.pack(each)) for each in weights]
    halves = [_packed(float_products.pack(each.bfloat16())) for each in weights]
    bytes_ = [(each / each.abs().amax() * 127).round().to(torch.int8) for each in weights]
    made: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
        "float32": lambda x: [float_products.multiply(x, each, None) for each in floats],
        "bfloat16 weights": lambda x: [float_products.multiply(x, each, None) for each in halves],
    }
    if float_products.multiplies_pairs():
        pairs = [_packed(float_products.pack(each.bfloat16(), pairs=True)) for each in weights]
        made["bfloat16"] = lambda x: [float_products.multiply(x, each, None) for each in pairs]
    if int8_products.panel_kernels() is not None:
        eights = [_packed(int8_products.pack(each)) for each in bytes_]
        made["int8"] = lambda x: [int8_products.multiply(x, each, scale, None) for each in eights]
    if group_products.group_kernels() is not None:
        for bits in (4, 8):
            groups = [_packed(group_products.pack(rounded(each, bits))) for each in weights]
            made[f"int{bits} in groups of 32"] = partial(_grouped, groups, scale)
    made[_BY_TORCH] = lambda x: [
        int8_products.multiply_plain(x, each, scale, None) for each in bytes_
    ]
    return made


def _grouped(weights: list[Any], scale: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    return [group_products.multiply(x, each, scale, None) for each in weights]


def _packed(weight: Any) -> Any:
    """A weight as a compiled product takes it."""
    assert weight is not None
    return weight


if __name__ == "__main__":
    main()

"""The parts of `gpu_compare.py`, and the process that measures them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from common.harness import machine
from gpu_suite import attention, attention_cases, bench, compared_steps, comparisons, parts, rows
from gpu_suite import shapes as sizes
from gpu_suite.worker import Plan, Row, serve_parts


class Benches:
    """An engine to measure and kernels to measure, one at a time on the device."""

    def __init__(self, plan: Plan) -> None:
        self._quick = plan.quick
        self._engines = bench.Bench(
            sizes.QUICK if plan.quick else sizes.REAL, plan.folder, quick=plan.quick
        )
        self._engines.roofs = dict(plan.roofs)
        self._kernels: attention.Bench | None = None

    @property
    def roofs(self) -> dict[str, float]:
        return self._engines.roofs

    @property
    def engines(self) -> bench.Bench:
        return self._engines

    @property
    def kernels(self) -> attention.Bench:
        self._engines.drop()
        if self._kernels is None:
            shape = attention_cases.QUICK if self._quick else attention_cases.WHOLE
            self._kernels = attention.Bench(shape, quick=self._quick, roofs={})
        return self._kernels

    def works(self) -> bool:
        return self._engines.works() and (self._kernels is None or self._kernels.works())


@dataclass(frozen=True, slots=True)
class Part:
    """A name, the seconds after which it yields what it has, and the function that measures."""

    name: str
    seconds: float
    measure: Callable[[Benches, float], Iterator[Row]]


def all_parts() -> list[Part]:
    """The most wanted first, kernels before engines."""

    def kernels(
        name: str, seconds: float, measure: Callable[[attention.Bench, float], Iterator[Row]]
    ) -> Part:
        return Part(name, seconds, lambda benches, deadline: measure(benches.kernels, deadline))

    def engines(
        name: str, seconds: float, measure: Callable[[bench.Bench, float], Iterator[Row]]
    ) -> Part:
        return Part(name, seconds, lambda benches, deadline: measure(benches.engines, deadline))

    return [
        engines("roofs", 20, parts.roofs),
        kernels("stages of tiles", 60, comparisons.tile_stages),
        engines("choice of tokens", 25, rows.choices),
        kernels("attention in graphs", 40, comparisons.in_graphs),
        kernels("fa2 beside fa3", 40, comparisons.flashinfer_kernels),
        kernels("fp8 cache", 40, comparisons.eight_bits),
        engines("decode graphs", 100, compared_steps.long_contexts),
        engines("mixed step", 70, compared_steps.mixed_steps),
        engines("fp8 cache, decode", 90, compared_steps.eight_bit_cache),
    ]


def measure(connection: Connection, plan: Plan) -> None:
    """Measures the parts of a plan, in the process that `run_parts` starts."""
    ends = time.perf_counter() + plan.limit
    benches = Benches(plan)
    where = machine()
    if plan.quick:
        where.pop("gpu", None)

    def run(part: Part) -> Iterator[Row]:
        return part.measure(benches, min(time.perf_counter() + part.seconds, ends))

    made = {part.name: partial(run, part) for part in all_parts()}
    serve_parts(connection, plan, made, benches, common={"machine": where})

"""What all parts of `gpu.py` share: the engine, its requests, and what a step must read."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from coppice.runtime.config import EngineConfig
from coppice.runtime.engine.core import Engine
from coppice.runtime.model.layers import Linear, RMSNorm
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner import batch as batches
from coppice.runtime.runner.cache.size import page_bytes
from gpu_suite.shapes import Sizes, write_model


@dataclass(frozen=True, slots=True)
class Ran:
    """A run of requests: its seconds, its tokens, and whether it was cut at the deadline.

    `lines` are the tokens of each request, `hits` the prompt tokens that the cache provided.
    """

    seconds: float
    tokens: int
    cut: bool
    lines: dict[str, list[int]] = field(default_factory=dict)
    hits: int = 0

    def row(self) -> dict[str, Any]:
        times = {"seconds": round(self.seconds, 3), "tokens_per_s": round(self.rate, 1)}
        return {"cut": True, "times": times} if self.cut else {"times": times}

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Bench:
    """One engine at a time, on the GPU or, with `--quick`, on the CPU with the same types."""

    def __init__(self, sizes: Sizes, folder: Path, *, quick: bool) -> None:
        self.sizes, self.quick = sizes, quick
        self.device = torch.device("cpu" if quick else "cuda")
        self.roofs: dict[str, float] = {}
        self._folder = folder
        self._engine: Engine | None = None
        self._made_with: tuple[Any, ...] = ()
        self._random = random.Random(0)

    def engine(self, model: str, **options: Any) -> Engine:
        """An engine with an empty cache; reused if it was made with the same options."""
        made_with = (model, *sorted(options.items()))
        if self._engine is not None and self._made_with == made_with:
            for number in range(self.sizes.max_num_seqs):  # what a failed part left
                self._engine.abort(str(number))
            self._engine.reset_cache()
            return self._engine
        self.drop()
        sizes = self.sizes
        common: dict[str, Any] = {
            "dtype": "bfloat16",
            "load_format": "dummy",
            "max_num_seqs": sizes.max_num_seqs,
            "max_num_batched_tokens": sizes.max_num_batched_tokens,
            "device": self.device.type,
        }
        if self.quick:
            # With drafts, the default on a CPU, answers could end before the steps to be measured.
            common |= {"speculation": "off"}
            common |= {"kv_cache_tokens": 2048, "attention_backend": "reference"}
        path = write_model(model, self._folder, quick=self.quick)
        self._engine = Engine(EngineConfig(model=str(path), **common, **options))
        self._made_with = made_with
        return self._engine

    def drop(self) -> None:
        """Drops the engine and frees its memory."""
        self._engine = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def works(self) -> bool:
        """Whether the device still computes after a part has failed; drops the part's engine."""
        try:
            self.drop()
            self.synchronize()
        except Exception:
            return False
        return True

    def prompt(self, tokens: int) -> list[int]:
        """New random tokens, which no cache has seen."""
        return self._random.choices(range(10, 300), k=tokens)

    def seconds(self, work: Callable[[], object], rounds: int) -> float:
        """Seconds of one call, of `rounds` calls that are queued one after another."""
        work()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            work()
        self.synchronize()
        return (time.perf_counter() - start) / rounds

    def run(
        self,
        engine: Engine,
        prompts: Sequence[list[int]],
        out: int,
        deadline: float,
        *,
        lines: int = 1,
        beams: int = 0,
    ) -> Ran:
        """Submits all prompts at once and runs them to their end or the deadline.

        Decoding is greedy, or `lines` > 1 samples at temperature 1, or a search of `beams` > 0.
        """
        self.synchronize()
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            if beams:
                search = BeamSearchParams(beams, out, ignore_eos=True)
                engine.add_beam_search(str(number), prompt, search)
            else:
                engine.add_request(str(number), prompt, line_params(out, lines))
        tokens, cut = 0, False
        made: dict[str, list[int]] = {}
        hits: dict[str, int] = {}
        while engine.has_unfinished() and not cut:
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                tokens += len(output.new_token_ids)
                made.setdefault(output.request_id, []).extend(output.new_token_ids)
                hits.setdefault(output.request_id, output.cached_tokens)
            cut = time.perf_counter() > deadline
        self.synchronize()
        seconds, cut = time.perf_counter() - start, cut and engine.has_unfinished()
        for number in range(len(prompts)):
            engine.abort(str(number))
        return Ran(seconds, tokens, cut, made, sum(hits.values()))


def line_params(out: int, lines: int = 1) -> SamplingParams:
    temperature = 0.0 if lines == 1 else 1.0
    return SamplingParams(n=lines, temperature=temperature, max_tokens=out, ignore_eos=True, seed=1)


@contextmanager
def sharing(on: bool) -> Iterator[None]:
    """While off, plans have no shared stretches: each sequence reads its own pages."""
    found = batches.shared_stretches
    if not on:
        batches.shared_stretches = lambda tables, full_pages: ()
    try:
        yield
    finally:
        batches.shared_stretches = found


def weight_bytes(engine: Engine) -> int:
    """Bytes of the weights that a step reads: without the embedding, unless that is the head."""
    modules = engine.runner.decoder.modules()
    read = [m for m in modules if isinstance(m, (Linear, RMSNorm))]
    return sum(p.nbytes for module in read for p in module.parameters(recurse=False))


def token_bytes(engine: Engine) -> int:
    """Bytes of one token's keys and values in all layers."""
    return page_bytes(engine.model_config, 1, engine.runner.kv_cache[0].k.dtype)


def product_flop(engine: Engine) -> tuple[int, int]:
    """FLOP of a token in the layers (without attention), and of a token in the head."""
    decoder = engine.runner.decoder
    layers = sum(m.weight.numel() for m in decoder.layers.modules() if isinstance(m, Linear))
    return 2 * layers, 2 * decoder.head.weight.numel()

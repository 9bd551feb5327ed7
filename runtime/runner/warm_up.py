"""Runs every kind of step once at start, so that no request waits for a kernel to be compiled.

On a CPU steps with drafts are timed then, too, so that the first requests get as many as pay.

A kernel is compiled at the first launch of each variant: of attention for few and for many rows,
with and without pieces of keys that are merged, with and without trees of drafts; of the choice of
tokens for each filter. That takes 0.4 to 1.6 s a variant, less where Triton's cache has it
(``~/.triton/cache``, or TRITON_CACHE_DIR), which lasts beyond the process. Libraries load their
kernels at the first call, too. On a CPU code is compiled once for all numbers of rows, in half a
minute, and kept on disk (``kernels.cpu.code.kept``).

The steps here name one page beyond the pool's, again and again: so contexts are as long as the
model allows, and no request's KV is touched.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from coppice.kernels.attention.branches import Branches
from coppice.kernels.attention.interface import AttentionBackend, AttentionPlan, LayerCache
from coppice.runtime.requests.request import Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.implementation import Model
from coppice.runtime.runner.page_tables import PADDING
from coppice.runtime.sampling.sampler import Sampler

logger = logging.getLogger(__name__)

# Rows of a prompt where code is the same for any number of them; each step reads all weights.
_FEW = 4
# Seconds from which warming up is logged on a CPU: few models take so long without compiling.
_LONG = 5.0
# Drafted tokens of a sequence whose steps are timed, and how often. A step of a large model takes
# half a second, so none is repeated after so many seconds.
_DRAFTED = (0, 1, 2, 4, 8, 16, 32, 48)
_TIMES, _SECONDS = 4, 2.0
#: Rows of prompts in a step with a long context; there are more than any tile of few rows has.
_CHUNK = 128


@dataclass(frozen=True, slots=True)
class WarmStep:
    """A step to run: its name, and of each sequence the rows and the length of its context.

    With ``drafts`` the rows of the first sequence are a tree.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    drafts: bool = False


def warm_steps(most_tokens: int, longest: int, *, drafts: bool) -> list[WarmStep]:
    """The kinds of steps that an engine with these bounds can have.

    ``longest``: tokens of a sequence; ``drafts``: whether steps may have trees.
    """
    whole = min(most_tokens, longest)
    chunk = min(_CHUNK, whole)
    steps = [
        WarmStep("a prompt", ((whole, whole),)),
        WarmStep("a token", ((1, min(2, longest)),)),
        WarmStep("a token after a long context", ((1, longest),)),
        WarmStep("a chunk after a long context", ((chunk, longest),)),
        WarmStep("tokens and a prompt", ((1, min(2, longest)), (chunk, chunk))),
        WarmStep("tokens and a chunk after long contexts", ((1, longest), (chunk, longest))),
    ]
    if drafts and whole >= 3:
        steps += [
            WarmStep("a draft", ((3, 3),), True),
            WarmStep("a draft after a long context", ((3, longest),), True),
            WarmStep("a draft and a prompt", ((3, 3), (chunk, chunk)), True),
            WarmStep("a draft and a chunk after long contexts", ((3, longest), (chunk, longest)),
                     True),
        ]  # fmt: skip
    return [step for step in steps if sum(rows for rows, _ in step.sequences) <= most_tokens]


def warm_code_steps(most_tokens: int, longest: int, *, drafts: bool) -> list[WarmStep]:
    """The kinds of steps where code is the same for any rows and any context, as on a CPU."""
    few = min(_FEW, most_tokens, longest)
    steps = [
        WarmStep("a prompt", ((few, few),)),
        WarmStep("a token", ((1, min(2, longest)),)),
    ]
    if drafts and few >= 3:
        steps.append(WarmStep("a draft", ((3, 3),), True))
    return steps


def warm_plan(step: WarmStep, page_size: int, page: int) -> AttentionPlan:
    """The plan of a step whose page tables name one page only."""
    rows = np.array([rows for rows, _ in step.sequences], np.int32)
    context = np.array([length for _, length in step.sequences], np.int32)
    pages = -(-context // page_size)
    query_start = np.concatenate(([0], np.cumsum(rows))).astype(np.int32)
    branches = None
    if step.drafts:
        # All rows of the tree follow the first one, side by side.
        positions = np.repeat(context - query_start[1:], rows) + np.arange(query_start[-1])
        positions[1 : rows[0]] = positions[0] + 1
        seen = np.zeros(query_start[-1], np.int64)
        seen[: rows[0]] = 1 | 1 << np.arange(rows[0], dtype=np.int64)
        branches = Branches(positions.astype(np.int32), seen)
    return AttentionPlan(
        page_size=page_size,
        query_start=query_start,
        context_len=context,
        page_indptr=np.concatenate(([0], np.cumsum(pages))).astype(np.int32),
        page_indices=np.full(int(pages.sum()), page, np.int32),
        stretches=(),
        branches=branches,
    )


Compute = Callable[[AttentionPlan, np.ndarray], torch.Tensor]
"""The logits of the last row of each sequence and of all rows of a tree, from a plan and the
positions of its rows."""


def one_page_steps(
    decoder: Model,
    attention: AttentionBackend,
    kv_cache: Seq[LayerCache],
    page_size: int,
    page: int,
    device: torch.device,
) -> Compute:
    """How a model computes steps whose KV all goes to ``page``, the last one of its cache."""

    def compute(plan: AttentionPlan, positions: np.ndarray) -> torch.Tensor:
        slots = np.full(plan.num_rows, page * page_size, np.int64)
        tokens = np.zeros(plan.num_rows, np.int64)
        lasts = plan.query_start[1:].astype(np.int64) - 1
        if plan.branches is not None:
            lasts = np.union1d(lasts, np.flatnonzero(plan.branches.seen))
        outbox = attention.outbox(device)
        if attention.tables is not None:
            one = np.ones(1, np.int32)
            outbox.write(attention.tables, one * PADDING, one * page)
        prepared = attention.prepare(plan, num_pages=page + 1, outbox=outbox)
        parcel = outbox.add([tokens, positions, slots, lasts])
        outbox.send()
        ids, places, sent_slots, rows = parcel.tensors
        return decoder.forward(ids, places, sent_slots, kv_cache, attention, prepared, rows, None)

    return compute


def warm_up(
    compute: Compute,
    steps: list[WarmStep],
    *,
    page_size: int,
    page: int,
    vocabulary: int,
    device: torch.device,
) -> str:
    """Runs the steps, then every choice of tokens; returns what it took, as text.

    Progress is logged; on a CPU, which compiles at its first start, only what takes long.
    """
    start = time.monotonic()
    total = len(steps) + 1
    level = logging.INFO if device.type == "cuda" else logging.DEBUG
    for number, step in enumerate(steps):
        logger.log(level, "warming up, %d of %d: %s", number + 1, total, step.name)
        _run(compute, step, page_size, page)
    logger.log(level, "warming up, %d of %d: the choice of tokens", total, total)
    warm_choice(vocabulary, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.monotonic() - start
    told = f"warming up {total} kinds of steps took {seconds:.1f} s"
    logger.log(level, "%s", told)
    if device.type == "cpu" and seconds > _LONG:
        logger.info("first steps took %.0f s, with kernels compiled where none were kept", seconds)
    return told


def _run(compute: Compute, step: WarmStep, page_size: int, page: int) -> None:
    plan = warm_plan(step, page_size, page)
    shift = plan.context_len - plan.query_start[1:]
    positions = np.repeat(shift, np.diff(plan.query_start)) + np.arange(plan.num_rows)
    compute(plan, positions.astype(np.int64))


def time_drafts(
    compute: Compute, most_tokens: int, longest: int, *, page_size: int, page: int, together: bool
) -> list[tuple[int, float]]:
    """Numbers of drafted tokens, and the least seconds of one sequence's step with so many.

    Call it after `warm_up`, or the times have compilation in them. Sizes take turns, since the
    speed of a machine changes. Ranks that compute `together` run the same steps, whatever their
    clocks say: each only once.
    """
    least: dict[int, float] = {}
    begin = time.perf_counter()
    for turn in range(1 if together else _TIMES):
        if turn and time.perf_counter() - begin > _SECONDS:
            break
        for drafted in _DRAFTED:
            rows = drafted + 1
            if rows > min(most_tokens, longest):
                break
            step = WarmStep(f"{drafted} drafted tokens", ((rows, rows),), drafted > 0)
            start = time.perf_counter()
            _run(compute, step, page_size, page)
            seconds = time.perf_counter() - start
            least[drafted] = min(seconds, least.get(drafted, seconds))
    return sorted(least.items())


def warm_choice(vocabulary: int, device: torch.device) -> None:
    """Chooses tokens with every rule and filter, alone and together."""
    if device.type == "cuda":
        from coppice.kernels.sampling.choose_triton import warm_up as compile_choice

        compile_choice(vocabulary, device)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1),
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
        SamplingParams(logit_bias={0: 1.0}, allowed_token_ids=[0, 1], min_tokens=5),
        SamplingParams(temperature=0, bad_words_token_ids=[[0], [0, 1]]),
        SamplingParams(temperature=0, logprobs=2),
    ]
    sequences = []
    for number, params in enumerate(kinds):
        request = Request(str(number), array("i", [0, 1]), params, None, 0, 0, 8)
        sequences.append(Sequence(request))
    sampler = Sampler(())
    for chosen in (sequences[:1], sequences):
        sampler.sample(torch.zeros(len(chosen), vocabulary, device=device), chosen).read()

"""Small steps as CUDA graphs: captured at start for some numbers of rows, then replayed.

A step of a small batch is a few hundred short kernels, and launching them takes the CPU longer than
running them takes the GPU. A graph is launched as one. It repeats what was captured with the same
addresses and grids, so everything that differs between steps lies in fixed places: token ids,
positions and slots here, the attention plan where the backend keeps it (``FixedPlan``). In a
decoding step each sequence has a row. Where the plans take chunks of prompts, too, a mixed
step of as many rows is replayed by the same graph.

A graph goes on to the logits of the rows that have them and to the choice of their tokens, with
temperatures, filters and random numbers in a fixed place, too (``Head``). Where a row needs more,
rules for example, its step takes the logits of the graph and chooses outside of it.

A step is padded to the next captured size. Where there is none, and where its plan has more work
than a graph has room for, the step runs kernel by kernel like any other, and is counted.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike

from coppice.kernels.attention.interface import FixedPlan
from coppice.kernels.sampling.columns import COLUMNS, MOST_PROBABLE
from coppice.kernels.transfer import Landing, Outbox
from coppice.runtime.runner.batch import Batch, LateTokens, build_batch
from coppice.runtime.runner.page_tables import PageTables
from coppice.runtime.schedule.chunks import Schedule

logger = logging.getLogger(__name__)

# Capturing ends after this time, or this fraction of the memory that was free before it: the
# largest sizes come first, and steps of fewer sequences are padded to the smallest there is.
CAPTURE_SECONDS = 60.0
CAPTURE_FRACTION = 0.5

#: Replayed; with more sequences than any graph has; with more attention work than a graph has room
#: for. The last two kinds run kernel by kernel.
DECODE_STEPS = ("graph", "too_many", "too_much")

#: Steps with rows of prompts: replayed, or not.
MIXED_STEPS = ("graph", "eager")

# The most rows of a graph for mixed steps alone. A step of more rows takes a GPU longer than
# launching its kernels takes the CPU.
_MOST_MIXED = 1024

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FixedPlan], torch.Tensor]
"""Hidden states ``[n, hidden]`` of token ids, positions and slots, int64 ``[n]``, and a plan."""

Results = tuple[torch.Tensor, ...]

Columns = Callable[[], np.ndarray | None]
"""Makes the parameters of the choice of a step's tokens, float64 ``[R, COLUMNS]``; None: they do
not suffice."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What follows the hidden states within a graph.

    Attributes:
        logits: float32 ``[r, vocabulary]`` of hidden states ``[r, hidden]``, in the tensor that is
            given, or in a new one.
        choose: tokens int64 ``[r]`` of logits and parameters float64 ``[r, COLUMNS]``, both on the
            device.
        most: rows with logits that a graph has room for.
    """

    logits: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    most: int


class Replayed(NamedTuple):
    """The results of a graph, of which the next replay overwrites all but the tokens.

    ``hidden`` of the rows with logits, then of prompts' rows; of all rows where there are none of
    prompts and ``logits`` are given. ``logits`` float32 ``[R, vocabulary]`` of those that have
    some, None if the graph has no room for them; ``tokens`` int64 ``[R]`` that were chosen, None if
    they were not.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


class Recorder(Protocol):
    """Captures graphs: on a GPU, or in tests without one."""

    def record(self, run: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        """A function that repeats `run`, and the tensors that then have the results."""

    def free_bytes(self) -> int:
        """Free memory of the device."""


class CudaRecorder:
    """Captures on a GPU. All graphs share one pool of memory, since one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                results = run()
            return graph.replay, results

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return free


def graph_sizes(most: int) -> tuple[int, ...]:
    """Numbers of sequences up to `most` that are worth a graph of their own, ascending.

    Larger ones lie further apart, since a padded row adds less to a step of many rows.
    """
    sizes, step = [1, 2, 4, 8], 8
    while sizes[-1] < most:
        if sizes[-1] >= 8 * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    return tuple(sorted({min(size, most) for size in sizes}))


def mixed_sizes(most_seqs: int, most_tokens: int) -> tuple[int, ...]:
    """Numbers of rows above those of decoding steps that mixed steps are captured with."""
    sizes, size = [], 2 * most_seqs
    while size <= min(most_tokens, _MOST_MIXED):
        sizes.append(size)
        size *= 2
    return tuple(sizes)


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """One captured graph: its plan, the place of its input, its replay and its results.

    It makes the logits of `rows` rows; 0: of none.
    """

    plan: FixedPlan
    landing: Landing
    rows: int
    replay: Callable[[], None]
    results: Results


class DecodeGraphs:
    """The graphs of one model and KV cache.

    Attributes:
        sizes: the numbers of sequences, ascending.
        seconds, bytes: what capturing took.
        steps: decoding steps by how they ran, one of `DECODE_STEPS`.
        mixed: steps with rows of prompts by how they ran, one of `MIXED_STEPS`.
        chosen: steps whose tokens a graph has chosen.
    """

    def __init__(
        self,
        forward: Forward,
        plans: Sequence[Sequence[FixedPlan]],
        sizes: Sequence[int],
        recorder: Recorder,
        *,
        page_size: int,
        spare_page: int,
        device: torch.device,
        outbox: Callable[[Batch], Outbox],
        resident: bool = False,
        head: Head | None = None,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Captures `forward`, from the largest of `sizes` on, with each of its `plans`.

        `spare_page` is outside the pool: padded rows write their KV there. `outbox` makes one that
        sends what changes in page tables; `resident`: whether plans point to these. Without a
        `head` graphs end with the hidden states. `agree` is asked before each size whether to stop,
        with what this rank would do: all ranks capture the same sizes, since they meet in each.
        """
        self._outbox = outbox
        self._spare_page = spare_page
        self._head = head
        # One for all graphs, since only the last step's logits are read: of one size they take up
        # to hundreds of megabytes.
        self._logits: torch.Tensor | None = None
        self._graphs: dict[int, list[_Graph]] = {}
        self.sizes: list[int] = []
        self.steps = dict.fromkeys(DECODE_STEPS, 0)
        self.mixed = dict.fromkeys(MIXED_STEPS, 0)
        self.chosen = 0
        start, free = time.monotonic(), recorder.free_bytes()
        self.seconds, self.bytes = 0.0, 0
        tables = PageTables(0) if resident else None
        nothing = build_batch(Schedule(), page_size, resident=tables)
        for size, kinds in sorted(zip(sizes, plans, strict=True), key=lambda each: -each[0]):
            # The next size is expected to take as long as the others did on average.
            spent = self.seconds / len(self._graphs) if self._graphs else 0.0
            late = self.seconds + spent > CAPTURE_SECONDS
            if agree(late or self.bytes > CAPTURE_FRACTION * free):
                logger.warning("no CUDA graphs for fewer than %d rows: %s", self.sizes[0], self)
                break
            padded = nothing.padded(size, spare_page)
            self._graphs[size] = [
                self._capture(forward, padded, plan, recorder, device) for plan in kinds
            ]
            self.sizes.insert(0, size)
            self.seconds = time.monotonic() - start
            self.bytes = max(0, free - recorder.free_bytes())

    def _capture(
        self,
        forward: Forward,
        batch: Batch,
        plan: FixedPlan,
        recorder: Recorder,
        device: torch.device,
    ) -> _Graph:
        size, head = len(batch.token_ids), self._head
        rows = 0 if head is None else min(size, head.most)
        line: tuple[tuple[int, ...], DTypeLike] = (size,), np.int64
        places = [line] * 3 + [((rows,), np.int64), ((rows, COLUMNS), np.float64)] + [line] * 2
        landing = Landing(
            places, torch.zeros(Landing.size(places), dtype=torch.uint8, device=device)
        )
        token_ids, positions, slots, logit_rows, columns, _, _ = landing.arrays
        if not plan.load(batch.plan):
            raise ValueError(f"a plan of {size} sequences of one token does not fit a graph")
        outbox = Outbox(device)
        _put(landing, batch, rows, None, outbox)
        outbox.send()

        def run() -> Results:
            hidden = forward(token_ids, positions, slots, plan)
            if head is None:
                return (hidden,)
            place = None if self._logits is None else self._logits[:rows]
            logits = head.logits(hidden.index_select(0, logit_rows), place)
            if self._logits is None:  # the largest graph comes first
                self._logits = logits
            return hidden, head.choose(logits, columns)

        run()  # compiles what is not compiled yet, which a capture must not
        replay, results = recorder.record(run)
        return _Graph(plan, landing, rows, replay, results)

    def run(
        self, batch: Batch, late: LateTokens | None, columns: Columns = lambda: None
    ) -> Replayed | None:
        """The results of a step's rows; None: run it without a graph.

        Tokens are chosen by `columns`. Only a backend with `mixed_plans` takes steps other than
        decoding ones.
        """
        made, how = self._run(batch, late, columns)
        if batch.decodes:
            self.steps[how] += 1
        else:
            self.mixed["graph" if how == "graph" else "eager"] += 1
        self.chosen += made is not None and made.tokens is not None
        return made

    def _run(
        self, batch: Batch, late: LateTokens | None, columns: Columns
    ) -> tuple[Replayed | None, str]:
        rows = len(batch.token_ids)
        place = bisect.bisect_left(self.sizes, rows)
        if place == len(self.sizes):
            return None, "too_many"
        size = self.sizes[place]
        padded = batch.padded(size, self._spare_page)
        for graph in self._graphs[size]:
            outbox = self._outbox(padded)
            if graph.plan.load(padded.plan, outbox):
                break
        else:
            return None, "too_much"
        wanted = len(batch.logit_rows)
        known = columns() if wanted <= graph.rows else None
        _put(graph.landing, padded, graph.rows, known, outbox)
        headed = self._logits is not None and wanted <= graph.rows
        some = None
        alone = wanted == batch.plan.num_sequences == rows  # each row is a sequence's last
        if len(batch.prompt_rows) or not (headed or alone):
            some = outbox.add([np.concatenate((batch.logit_rows, batch.prompt_rows))])
        outbox.send()
        if late is not None and len(batch.late_rows):
            token_ids, *_, late_rows, late_from = graph.landing.arrays
            late.fill(token_ids, *(each[: len(batch.late_rows)] for each in (late_rows, late_from)))
        graph.replay()
        hidden, *tokens = graph.results
        hidden = hidden[:rows] if some is None else hidden.index_select(0, some.tensors[0])
        if self._logits is None or not headed:
            return Replayed(hidden), "graph"
        # A copy, since the next step reads these tokens, and may have to be repeated.
        chosen = None if known is None else tokens[0][:wanted].clone()
        return Replayed(hidden, self._logits[:wanted], chosen), "graph"

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.sizes))
        return (
            f"{len(self.sizes)} CUDA graphs for steps of {sizes} rows took "
            f"{self.seconds:.1f} s and {self.bytes / 2**20:.0f} MiB"
        )


def _put(
    landing: Landing, batch: Batch, rows: int, known: np.ndarray | None, outbox: Outbox
) -> None:
    """Puts a step in its place, of which `rows` may have logits; `known` are their parameters.

    Rows without parameters take the most probable token, for which one look at each logit does.
    """
    columns = np.empty((rows, COLUMNS))
    columns[:] = MOST_PROBABLE
    if known is not None:
        columns[: len(known)] = known
    wanted = batch.logit_rows if len(batch.logit_rows) <= rows else batch.logit_rows[:0]
    arrays = [batch.token_ids, batch.positions, batch.slots, wanted, columns]
    fits = outbox.put(landing, [*arrays, batch.late_rows, batch.late_from])
    assert fits  # not with the call in it, which `python -O` leaves out

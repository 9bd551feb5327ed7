"""Choose a token for each row of logits by temperature, top-k, top-p and min-p, without sorting.

The tokens of a row are ordered: the more probable first, among equals the one with the lower id
(logits of 16-bit products have many equals). Top-k and top-p each keep the tokens up to a place in
that order; min-p keeps those whose probability is at least a fraction of the highest. A sort of the
vocabulary would give these places, but on a GPU it takes longer than the whole model. A place is a
probability, and the number of its equals that are kept; the probability is found by bisection, in
at most 30 passes over the row, since a float32 from 0 to 1 has 30 bits. Sums are in float64, so
that the place is the one that sorting would find.

Then the row's own number in [0, 1) chooses the first token, in the order of ids, at which the
running sum of the kept weights exceeds that fraction of their total. The result depends on the
row's own logits and numbers alone.

FlashInfer's kernels do not serve here. Those that sample draw numbers that depend on the row's
place in the batch. Those that only filter keep all equals of the last token, more than top-k asks
for, and do not draw. On a GPU `choose_triton` finds places by the bits of probabilities, ten at a
time, and so does `choose_numba` on a CPU. The code here runs where neither does.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import numpy as np
import torch

from coppice.kernels.sampling.columns import MIN_P, TOP_K, TOP_P
from coppice.kernels.transfer import send

_log = logging.getLogger(__name__)

# The bits of 1.0, the greatest weight.
_ONE = 0x3F800000
# Up to this top-k torch's `topk` takes less time than bisection.
_FEW = 256


def choose(logits: torch.Tensor, columns: np.ndarray) -> torch.Tensor:
    """A token of each row, int64 ``[R]``, of logits float32 ``[R, V]``, each row with a finite one.

    ``columns`` is float64 ``[R, COLUMNS]``. The result stays on the device of the logits, and the
    host does not wait for it.
    """
    if logits.is_cuda:
        from coppice.kernels.sampling.choose_triton import choose_rows

        (numbers,) = send([columns], logits.device)
        return choose_rows(logits, numbers, columns)
    rows = np.flatnonzero(columns[:, TOP_K] != 1)
    some = len(rows) < len(columns)
    compiled = compiled_choice() if logits.device.type == "cpu" and len(rows) else None
    if compiled is not None:
        tokens = likeliest(logits) if some else torch.empty(len(rows), dtype=torch.int64)
        compiled.choose_rows(
            logits.contiguous().numpy(), columns, rows, tokens.numpy(), torch.get_num_threads()
        )
        return tokens
    tokens = likeliest(logits)
    if not len(rows):
        return tokens
    index, numbers = send([rows, columns[rows] if some else columns], logits.device)
    if not some:
        return _choose(logits, columns, numbers)
    chosen = _choose(logits.index_select(0, index), columns[rows], numbers)
    return tokens.index_copy_(0, index, chosen)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The token with the highest logit of each row, int64 ``[R]``, of float32 ``[R, V]``.

    Of equals it is the one with the lowest id. On a CPU numpy finds it, a vector at a time: of 16
    rows of 32,000 in a ninth of the time that torch takes, of 32 in a fifth.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def choose_by(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``choose`` for a graph: the columns are where the logits are, and only known when it runs.

    So all is launched that columns can ask for.
    """
    if logits.is_cuda:
        from coppice.kernels.sampling.choose_triton import choose_rows

        return choose_rows(logits, columns)
    return choose(logits, columns.numpy())


@cache
def compiled_choice() -> ModuleType | None:
    """``choose_numba``, compiled or loaded from numba's cache; None where it does not work."""
    try:
        from coppice.kernels.sampling import choose_numba

        _try_out(choose_numba)
    except Exception as error:  # numba raises its own types, LLVM's, ImportError and OSError
        _log.info("tokens are chosen by torch: %s: %s", type(error).__name__, error)
        return None
    return choose_numba


def _try_out(compiled: ModuleType) -> None:
    """Every kind of filter on rows whose order is known, alone and shared among threads."""
    weights = np.array([8.0, 1.0, 4.0, 2.0, 1.0], np.float32)
    filters = {(5, 1.0, 0.0): 4, (2, 1.0, 0.0): 2, (5, 0.6, 0.0): 2, (5, 1.0, 0.2): 3}
    for width in (len(weights), 1 << 15):
        logits = np.full((len(filters), width), -np.inf, np.float32)
        logits[:, : len(weights)] = np.log(weights)
        columns = np.array([[1.0, *each, 0.999] for each in filters])
        tokens = np.empty(len(columns), np.int64)
        compiled.choose_rows(logits, columns, np.arange(len(columns)), tokens, 2)
        if tokens.tolist() != [*filters.values()]:
            raise ArithmeticError("the compiled kernels choose wrong tokens")


def _choose(logits: torch.Tensor, columns: np.ndarray, numbers: torch.Tensor) -> torch.Tensor:
    """The choice in torch; ``numbers`` are ``columns`` on the device of the logits."""
    temperature, top_k, top_p, min_p, uniform = numbers.split(1, dim=1)
    weights = logits - logits.amax(dim=-1, keepdim=True)
    weights = weights.div_(temperature.float()).exp_()
    kept = weights
    few_k, few_p = columns[:, TOP_K] < weights.shape[1], columns[:, TOP_P] < 1
    if few_k.any() or few_p.any():
        keys = weights.view(torch.int32)  # in the order of weights, since none is negative
        total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
        last = torch.zeros(len(weights), 1, dtype=torch.int32, device=weights.device)
        equals = torch.full_like(total, torch.inf)
        if few_k.any():
            last, equals, total = _keep_most(weights, keys, total, top_k, columns[few_k, TOP_K])
        if few_p.any():
            target = torch.where(top_p < 1, top_p * total, torch.inf)
            place = _place(keys, weights, target)
            above = _above(keys, place, weights)
            each = place.view(torch.float32).double()
            count = ((target - above) / each).ceil_().clamp_(min=1)
            equals = torch.where(place > last, count, torch.minimum(count, equals))
            last = torch.maximum(place, last)
        same = keys == last
        rank = same.cumsum(dim=-1, dtype=torch.int32)
        kept = weights * ((keys > last) | (same & (rank <= equals)))
    if columns[:, MIN_P].any():
        kept = kept * (weights >= min_p)
    return _invert(kept, uniform)


def _keep_most(
    weights: torch.Tensor,
    keys: torch.Tensor,
    total: torch.Tensor,
    top_k: torch.Tensor,
    asked: np.ndarray,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last key that top-k keeps, the number of its equals kept, and the weight of all kept."""
    limited = top_k < weights.shape[1]
    most = int(asked.max())
    if most <= _FEW:
        found = keys.topk(most, dim=-1).values
        place = found.gather(1, (top_k.clamp(max=most) - 1).long())
        place = torch.where(limited, place, 0)
    else:
        place = _place(keys, None, torch.where(limited, top_k, torch.inf))
    count = torch.where(limited, top_k - _above(keys, place, None), torch.inf)
    mass = _above(keys, place, weights) + count * place.view(torch.float32)
    return place, count, torch.where(limited, mass, total)


def _place(keys: torch.Tensor, weights: torch.Tensor | None, target: torch.Tensor) -> torch.Tensor:
    """The least key above which there is less than the target, int32 ``[R, 1]``.

    Without weights each token counts 1.
    """
    low = torch.zeros(len(keys), 1, dtype=torch.int32, device=keys.device)
    high = torch.full_like(low, _ONE)
    for _ in range(_ONE.bit_length()):
        middle = (low + high) // 2
        less = _above(keys, middle, weights) < target
        high = torch.where(less, middle, high)
        low = torch.where(less, low, middle + 1)
    return high


def _above(keys: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """The weight, or without weights the number, of keys above a place: float64 ``[R, 1]``."""
    above = keys > place
    if weights is None:
        return above.sum(dim=-1, keepdim=True).double()
    return (weights * above).sum(dim=-1, keepdim=True, dtype=torch.float64)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index, int64 ``[R]``, at which the running sum of ``weights [R, V]`` is enough.

    That is more than the fraction ``uniform [R, 1]`` of the whole sum.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(sums, uniform * sums[:, -1:], right=True).squeeze(1)
    # Rounding may reach the very end: then the last token of any weight is chosen.
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(index, last)

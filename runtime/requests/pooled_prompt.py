"""One prompt's vector or score, from the rows of its hidden states as they are computed.

The last token's state needs one row, so that all tokens before it may hit. A mean needs every row:
it hits nothing but what this request itself has read before it was preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from coppice.runtime.requests.pooling_params import PoolingParams
from coppice.runtime.requests.pooling_recipe import EmbedRecipe, ScoreRecipe

ScoreHead: TypeAlias = Callable[[torch.Tensor, tuple[int, int | None] | None], torch.Tensor]
"""`(states [1, hidden], tokens) -> float32 [1, labels]`, as `Decoder.scores`."""


class PooledPrompt:
    """A `PromptReader` that pools.

    Attributes:
        limits_hits: whether it needs the rows of all tokens.
    """

    def __init__(
        self, count: int, params: PoolingParams, recipe: EmbedRecipe | ScoreRecipe
    ) -> None:
        """`count` is the number of the prompt's tokens."""
        self.limits_hits = isinstance(recipe, EmbedRecipe) and recipe.pooling == "mean"
        self._count = count
        self._params = params
        self._recipe = recipe
        self._read = 0  # tokens whose rows are in the sum of a mean
        self._sum: torch.Tensor | None = None
        self._pooled: torch.Tensor | None = None  # float32 [numbers], on the device

    @property
    def complete(self) -> bool:
        """Whether its rows were read."""
        return self._pooled is not None

    def limit(self, length: int) -> int:
        return min(length, self._read) if self.limits_hits else length

    def rows(self, start: int, count: int) -> range:
        first = self._read if self.limits_hits else self._count - 1
        return range(max(start, first), start + count)

    def take(self, rows: torch.Tensor, head: ScoreHead) -> None:
        """Reads the next rows that it asked for, `[S, hidden]`, in order."""
        if self.limits_hits:
            total = rows.float().sum(0)
            self._sum = total if self._sum is None else self._sum + total
            self._read += len(rows)
            if self._read == self._count:
                self._pooled = self._sum / self._count
        elif isinstance(self._recipe, ScoreRecipe):
            self._pooled = head(rows[-1:], self._recipe.tokens)[0]
        else:
            self._pooled = rows[-1].float()

    def result(self) -> np.ndarray:
        """The vector, or the score of each label: float32."""
        assert self._pooled is not None, "the prompt is not computed yet"
        found: np.ndarray = self._pooled.cpu().numpy().astype(np.float32)
        recipe, active = self._recipe, self._params.use_activation
        if isinstance(recipe, EmbedRecipe):
            found = found[: self._params.dimensions]
            if recipe.normalize if active is None else active:
                found = found / max(float(np.linalg.norm(found)), 1e-12)
            return found
        if active is False or recipe.activation == "none":
            return found
        if recipe.activation == "sigmoid":
            return (1 / (1 + np.exp(-found.astype(np.float64)))).astype(np.float32)
        grown = np.exp(found - found.max())
        shares: np.ndarray = grown / grown.sum()
        return shares

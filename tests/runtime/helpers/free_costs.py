"""Costs of drafts that do not depend on the machine: rows and passes that are nearly free."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from coppice.runtime.engine.core import Engine
from coppice.runtime.sampling.drafts.budget import AskingBudget


class FreeRows:
    """Steps whose rows cost nothing."""

    def observe(self, tokens: int, drafted: int, seconds: float) -> None:
        """It knows."""

    def expect(self, seconds: Seq[tuple[int, float]]) -> None:
        """It knows."""

    def curve(self, tokens: int) -> np.ndarray:
        return np.ones(200) + 0.001 * np.arange(200)

    def drafting(self, tokens: int) -> int:
        return 0  # the time of steps without drafts is known


class FreePasses:
    """Passes of a draft model that cost a hundredth of a step."""

    def observe(self, rows: int, seconds: float) -> None:
        """It knows."""

    def line(self, step: float) -> tuple[float, float]:
        return 0.01, 0.0001


class FreeAsking(AskingBudget):
    """Is never spent, however long it takes to ask."""

    def asked(self, sequences: int, doubtful: int, seconds: float) -> None: ...
    def saved(self, seconds: float) -> None: ...


def make_free(engine: Engine) -> None:
    """Has an engine draft as if rows and passes were free."""
    if engine.drafts is not None:
        engine.drafts.costs = FreeRows()  # type: ignore[assignment]
        engine.drafts.budget = FreeAsking()
        if engine.drafts.model is not None:
            engine.drafts.model.passes = FreePasses()  # type: ignore[assignment]

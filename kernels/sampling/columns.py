"""The parameters of the choice of a token, as columns of an array with a row for each token."""

from __future__ import annotations

from typing import Final

import numpy as np

#: Numbers of a row, float64: the temperature, above 0; top-k (from the size of the vocabulary on:
#: all tokens; 1: the most probable one, for any other columns); top-p (from 1 on: all);
#: min-p; and the number in [0, 1) that chooses.
COLUMNS: Final = 5
TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM = range(COLUMNS)

#: A row that takes its most probable token.
MOST_PROBABLE: Final = np.array([1.0, 1.0, 1.0, 0.0, 0.0])

"""What is asked of the choice of a row's token, as columns of an array."""

from __future__ import annotations

from typing import Final

#: Numbers of a row, float64: the temperature, above 0; most tokens (from the size of the vocabulary
#: on: all; 1 is the most probable one, whatever the others say); top-p (from 1 on: all); min-p; and
#: the number that chooses.
COLUMNS: Final = 5
TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM = range(COLUMNS)

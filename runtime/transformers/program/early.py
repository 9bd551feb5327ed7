"""Runs the early operations of a recording again, for the tokens and positions of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coppice.runtime.transformers.program.record import Recording, Unrecorded, storage

_INPUTS = 2  # tokens and positions, the first values


@dataclass(frozen=True, slots=True)
class _Rows:
    """A number of an argument: so many times the rows."""

    times: int


@dataclass(frozen=True, slots=True)
class _Ref:
    """A tensor that an operation returned: which value, and which of its results."""

    value: int
    which: int


@dataclass(frozen=True, slots=True, eq=False)
class _Constant:
    """A tensor that is the same in each step."""

    tensor: torch.Tensor

    def __repr__(self) -> str:
        return f"constant {id(self.tensor)}"


class Early:
    """The operations that ``wanted`` results need, each different one once.

    After all ``want`` calls, ``run`` returns the results in their order.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._places: dict[int, tuple[int, int]] = {}  # of tensors: operation, which result
        for place, noted in enumerate(recording.early):
            for which, out in enumerate(noted.outs):
                self._places.setdefault(id(out), (place, which))
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._made: dict[int, int] = {}  # operations by their places: the value
        self._known: dict[Any, int] = {}
        self._results: list[tuple[int, int, int]] = []

    def want(self, tensor: torch.Tensor, rows_dim: int) -> int:
        """The number of a result: of the value ``tensor``, rows first."""
        place, which = self._places[id(tensor)]
        found = self._value(place), which, rows_dim
        if found not in self._results:
            self._results.append(found)
        return self._results.index(found)

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """The results for these tokens, each contiguous with rows first."""
        values: list[Any] = [(token_ids,), (positions,)]
        rows = len(token_ids)

        def given(each: Any) -> Any:
            if type(each) is _Ref:
                return values[each.value][each.which]
            if type(each) is _Rows:
                return each.times * rows
            if type(each) is _Constant:
                return each.tensor
            if type(each) in (list, tuple):
                return type(each)(map(given, each))
            return each

        for function, args, options in self._steps:
            out = function(*map(given, args), **{k: given(v) for k, v in options.items()})
            values.append((out,) if isinstance(out, torch.Tensor) else out)
        return [
            values[value][which].movedim(dim, 0).contiguous() for value, which, dim in self._results
        ]

    def _value(self, place: int) -> int:
        """The number of the value that the operation at ``place`` makes."""
        if place in self._made:
            return self._made[place]
        noted = self._recording.early[place]
        args = tuple(self._argument(each) for each in noted.args)
        options = {name: self._argument(each) for name, each in noted.options.items()}
        function = noted.function if noted.module is None else noted.module
        key = repr((id(function), args, sorted(options.items())))
        if key not in self._known:
            self._steps.append((function, args, options))
            self._known[key] = len(self._steps) - 1 + _INPUTS
        self._made[place] = self._known[key]
        return self._known[key]

    def _argument(self, each: Any) -> Any:
        recording, rows = self._recording, self._recording.rows
        if isinstance(each, torch.Tensor):
            if each is recording.tokens:
                return _Ref(0, 0)
            if each is recording.positions:
                return _Ref(1, 0)
            if id(each) in self._places:
                place, which = self._places[id(each)]
                return _Ref(self._value(place), which)
            if storage(each) in recording.origins:
                raise Unrecorded("a tensor is of unknown origin")
            return _Constant(each)
        if type(each) is int and each > 0 and each % rows == 0:
            return _Rows(each // rows)
        if type(each) in (list, tuple):
            return type(each)(map(self._argument, each))
        return each

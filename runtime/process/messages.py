"""The messages between an engine's process and its parent: plain data, which needs no torch.

in    (number, method, args, kwargs)   one of the calls of `EngineService`; number None: no answer
                                       is sent; or one of those of the loop itself:
                                       "subscribe"        to be told what the cache holds
                                       "introduce", name  who calls
                                       "callers"          the names of those who are connected
      PING                             a `Pulse` is wanted
      End                              the process should end
out   Ready                            the model is loaded
      [row, ...]                       outputs of a step, to be read with `step_output`
      Leaving                          the process ends, and why
      Told                             to who has called "subscribe": what the cache holds, the load
      Lost                             from many engines, one of which has ended

On a pipe of their own, so that they do not queue after outputs:

out   (number, failed, result)         the answer of a call, or the exception that it raised
      Pulse                            the answer of a ping, at once, whatever the engine does
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from coppice.radix.mirror.changes import Change
from coppice.runtime.metrics.events.load import Load
from coppice.runtime.requests.pooling_recipe import Recipe
from coppice.runtime.requests.request import StepOutput

# A dataclass takes ten times as long to pickle as the tuple of its fields. Most outputs are new
# tokens of a sequence that continues: they are sent without the fields that are empty then.
_FIELDS = [each.name for each in fields(StepOutput)]
_whole_row = attrgetter(*_FIELDS)
_SHORT = ("request_id", "index", "new_token_ids", "drafted", "accepted", "num_prompt_tokens",
          "cached_tokens", "cached_by_tier")  # fmt: skip
_short_row = attrgetter(*_SHORT)


@dataclass(frozen=True)
class Door:
    """Where an engine takes further callers: a port, and the key that they must know."""

    port: int
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Ready:
    """What the parent needs to know of an engine that has been loaded."""

    memory: str  # the arithmetic of its memory
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    recipe: Recipe  # what the checkpoint is made for
    caching: bool = True  # whether prompts stay in the cache
    model_impl: str = "coppice"  # whose code computes it: coppice or transformers
    model_digest: str = ""  # of the model's config: equal in replicas of one model
    weights_digest: str = ""  # of what they contain, where others may connect, likewise
    max_num_seqs: int = 1  # sequences that run together
    door: Door | None = None  # if it was asked to take further callers


@dataclass(frozen=True)
class End:
    """The process should end, as soon as it has stored in tiers what there is time for."""

    seconds: float | None = None  # that this may take; None: as long as engines take by themselves


@dataclass(frozen=True)
class Leaving:
    """The last message of a process that cannot continue; another one may."""

    reason: str


@dataclass(frozen=True)
class Told:
    """What has changed in an engine's tree, and how busy the engine is; None: as before."""

    changes: list[Change]
    load: Load | None


@dataclass(frozen=True)
class Lost:
    """A request whose answer had begun, and whose engine has ended, while others go on.

    If it may run again, whoever gets it calls "again" with its name, and its outputs come from the
    beginning; or else "abort".
    """

    request_id: str
    reason: str
    may_run_again: bool = False


PING = "ping"


@dataclass(frozen=True)
class Pulse:
    """What the engine's main thread does; another thread reports it."""

    turn: int  # calls and a step are taken in turns, counted from 1
    busy: bool  # whether a turn is running; else the engine waits for calls
    warm: bool  # whether a step has ended: the first one may compile what later ones use


def step_row(output: StepOutput) -> tuple[Any, ...]:
    """An output as it is sent."""
    whole = (
        output.finish_reason is not None
        or output.logprobs is not None
        or output.prompt_logprobs is not None
        or output.best_so_far is not None
    )
    return _whole_row(output) if whole else _short_row(output)


def is_short(row: tuple[Any, ...]) -> bool:
    """Whether a row has only the request, the sequence, its new tokens, and counts.

    It begins with the arguments of `Texts.keep`.
    """
    return len(row) == len(_SHORT)


def step_output(row: tuple[Any, ...]) -> StepOutput:
    """The output that a row stands for."""
    if is_short(row):
        request_id, index, tokens, drafted, accepted, *prompt = row
        made = StepOutput(request_id, index, tokens, None, None, None, *prompt)
        made.drafted, made.accepted = drafted, accepted
        return made
    return StepOutput(*row)

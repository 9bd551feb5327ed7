"""Stop strings for beam searches: the text of each beam as it is extended, forked and dropped.

A request that is sampled ends at a stop string when its text gets there. Of a beam search that is
too late: a beam that has ended must make room for another one in the same step. So the engine, who
knows no text, is given this; in a process of its own it loads the tokenizer there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

from coppice.frontend.text.detokenizer import IncrementalDecoder
from coppice.frontend.text.stop_strings import StopStrings
from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.beam_search_params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class StopStringWatch:
    """One beam's text so far; a `LineWatch` of the engine's. Extending it makes another one."""

    decoder: IncrementalDecoder
    stops: StopStrings
    unarmed: int  # so many tokens more are not looked at, because of min_tokens

    def follow(self, token: int) -> tuple[StopStringWatch, str | None]:
        """The watch behind one more token, and the stop string that is complete there.

        Costs the decoding of a few tokens and a copy of the text.
        """
        decoder, stops = self.decoder.copy(), self.stops.copy()
        stops.push(decoder.push((token,)), armed=self.unarmed == 0)
        return StopStringWatch(decoder, stops, max(0, self.unarmed - 1)), stops.matched


@dataclass(frozen=True, slots=True)
class WatchStopStrings:
    """Makes the watches of an engine; it can be pickled.

    Args:
        tokenizer: the directory of the model's tokenizer, which is loaded on first use.
    """

    tokenizer: str

    def __call__(
        self, params: BeamSearchParams, prompt_token_ids: Sequence[int]
    ) -> StopStringWatch:
        """The watch of a search's beginning, behind that prompt."""
        tokenizer = _load(self.tokenizer)
        decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        exact = params.structured_outputs is not None
        decoder = IncrementalDecoder(decode, tokenizer.text_before(prompt_token_ids, exact=exact))
        stops = StopStrings(params.sampling.stop_strings, include=params.include_stop_str_in_output)
        return StopStringWatch(decoder, stops, params.min_tokens)


@cache
def _load(path: str) -> Tokenizer:
    return Tokenizer(path)

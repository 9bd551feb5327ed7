"""Stop strings for beam searches: the text of each beam as it is extended, forked and dropped.

A sampled request is ended by the frontend when its text reaches a stop string. For a beam search
that is too late: a beam that has ended must make room for another one in the same step. So the
engine, which knows no text, calls the watches of this module, which load the tokenizer in its
process.
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
    """One beam's text so far, as the engine's `LineWatch`. Extending it makes a new watch."""

    decoder: IncrementalDecoder
    stops: StopStrings
    unarmed: int  # tokens yet to come in which no stop string counts, because of min_tokens

    def follow(self, token: int) -> tuple[StopStringWatch, str | None]:
        """The watch after one more token, and the stop string that is complete there.

        Costs the decoding of a few tokens and a copy of the text.
        """
        decoder, stops = self.decoder.copy(), self.stops.copy()
        stops.push(decoder.push((token,)), armed=self.unarmed == 0)
        return StopStringWatch(decoder, stops, max(0, self.unarmed - 1)), stops.matched


@dataclass(frozen=True, slots=True)
class WatchStopStrings:
    """Makes the watches of an engine; picklable.

    Args:
        tokenizer: the directory of the model's tokenizer, which is loaded on first use.
    """

    tokenizer: str

    def __call__(
        self, params: BeamSearchParams, prompt_token_ids: Sequence[int]
    ) -> StopStringWatch:
        """The watch at the beginning of a search, after its prompt."""
        tokenizer = _load(self.tokenizer)
        decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        exact = params.structured_outputs is not None
        decoder = IncrementalDecoder(decode, tokenizer.text_before(prompt_token_ids, exact=exact))
        stops = StopStrings(params.sampling.stop_strings, include=params.include_stop_str_in_output)
        return StopStringWatch(decoder, stops, params.min_tokens)


@cache
def _load(path: str) -> Tokenizer:
    return Tokenizer(path)

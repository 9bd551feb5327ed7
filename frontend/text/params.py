"""Sampling parameters as the engine takes them: words become token ids."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from coppice.frontend.text.tokenizer import Tokenizer
from coppice.runtime.requests.beam_search_params import BeamSearchParams
from coppice.runtime.requests.sampling_params import MAX_PREDICTED, SamplingParams

Params = TypeVar("Params", SamplingParams, BeamSearchParams)

# A prediction may be of any length. So much of it is made tokens: few texts have more characters in
# as many tokens as are kept.
_PREDICTED_CHARACTERS = 8 * MAX_PREDICTED


def for_engine(params: Params, tokenizer: Tokenizer) -> Params:
    """The parameters without words, and without the choice that `best_of` leaves to the frontend.

    Raises ValueError for words that cannot be made tokens.
    """
    if isinstance(params, SamplingParams) and params.chooses:
        top = 0 if params.logprobs is None else params.logprobs
        params = replace(params, n=params.num_sequences, best_of=None, logprobs=top)
    return words_as_tokens(params, tokenizer)


def words_as_tokens(params: Params, tokenizer: Tokenizer) -> Params:
    """The parameters with token ids for `bad_words`, of which there may be many, and `prediction`.

    A prediction is cut at 524,288 characters and 65,536 tokens. Raises ValueError for words that
    cannot be made tokens.
    """
    if isinstance(params, SamplingParams) and params.prediction is not None:
        text = params.prediction[:_PREDICTED_CHARACTERS]
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("prediction must be valid Unicode, got a lone surrogate") from None
        predicted = tokenizer.encode_more(text)
        params = replace(params, prediction=None, prediction_token_ids=predicted)
    if not params.bad_words:
        return params
    words = list(params.bad_words_token_ids or ())
    for word in params.bad_words:
        for spelt in (word.lstrip(), " " + word.lstrip()):
            try:
                spelt.encode()
            except UnicodeEncodeError:
                raise ValueError(f"bad_words must be valid Unicode, got {word!a}") from None
            ids = tokenizer.encode_more(spelt)
            if not ids:
                raise ValueError(f"bad_words must be words that have tokens, got {word!r}")
            words.append(tuple(ids))
    return replace(params, bad_words=None, bad_words_token_ids=words)

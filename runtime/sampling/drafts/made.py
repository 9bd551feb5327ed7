"""The speculation of an engine, as its options ask for it."""

from __future__ import annotations

import secrets

from coppice.radix.mirror.suffixes.index import SuffixIndex
from coppice.runtime.sampling.drafts.forced import ForcedDrafts
from coppice.runtime.sampling.drafts.policy import TreeSpeculation
from coppice.runtime.sampling.drafts.predicted import PredictedDrafts
from coppice.runtime.sampling.drafts.suffixes import SuffixDrafts

# Tokens of text that are kept for drafts, at 16 bytes: the KV cache's, and of evicted text as many.
_TIMES = 2
_FEWEST, _MOST = 1 << 16, 1 << 22


def make_speculation(cache_tokens: int, vocabulary: int, most: int) -> TreeSpeculation:
    """Drafts of at most `most` tokens, from all that is known without another model.

    `vocabulary` is the number of the model's tokens.
    `cache_tokens` is the size of the KV cache, with which the memory for text grows, from 1 MiB to
    64 MiB.
    """
    kept = min(max(_TIMES * cache_tokens, _FEWEST), _MOST)
    # The hashes have a seed that nobody knows: which texts share a slot can't be found out.
    index = SuffixIndex(kept, secrets.randbits(31))
    return TreeSpeculation([ForcedDrafts(vocabulary), PredictedDrafts(), SuffixDrafts(index)], most)

"""From logits to a token: rules, grammars, the choice itself, logprobs, and beam search.

The front uses `beam_search.BeamSearchParams` and `grammar_source`.
"""

"""From logits to a token: rules, grammars, the choice itself, logprobs, and beam search.

The frontend uses `grammar_source.check`, and implements `beam_search.LineWatch`.
"""

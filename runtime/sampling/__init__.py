"""From logits to a token: rules, grammars, the choice itself, logprobs, and beam search.

The front uses `grammar_source.check`, and implements `beam_search.LineWatch`.
"""

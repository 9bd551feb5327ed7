"""Which replica gets a request: the expected time to the first token at each, and what that needs.

`policy` decides; the others are what it knows: prompts on their way, times beside the tokens,
answers that are owed, names of the cached.
"""

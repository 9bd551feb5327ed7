"""What a user asks for: a request, its parameters, and the sequences that it extends.

The front uses `request`, `sampling_params`, `structured_outputs` and `logprobs`.
"""

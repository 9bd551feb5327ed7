"""What a user asks for: a request, its parameters, and the sequences of tokens that it extends.

The other sub-rooms and the frontend use all of it.
"""

"""What is read once: which rows walk which keys, at which cost, in which pieces.

The backends use it; other rooms do not.
"""

"""The choice of a token for each row of logits, on each device, without sorting.

Other rooms use `choose`.
"""

"""What was ever seen: which prefixes, which content, and when, in tables of bounded size.

Only `radix.accounting` uses it.
"""

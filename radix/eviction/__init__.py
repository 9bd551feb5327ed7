"""Who goes first: the eviction policies, and what each keeps about the leaves of the tree.

The tree asks an `order.EvictionOrder`; `recency.make_order` makes one by its name in `POLICIES`.
"""

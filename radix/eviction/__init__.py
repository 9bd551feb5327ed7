"""What is evicted first: the policies, and what each knows about the leaves of the tree.

The tree asks an `order.EvictionOrder`; `recency.make_order` makes one by its name in `POLICIES`.
"""

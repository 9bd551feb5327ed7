"""The contract of attention over pages: plans, arguments, checks, and a plain reference.

Other rooms use `interface`: `AttentionBackend`, `AttentionPlan`, `LayerCache`.
"""

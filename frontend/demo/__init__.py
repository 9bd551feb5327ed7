"""The demo: a handbook of facts, questions about it, and the small model that answers them."""

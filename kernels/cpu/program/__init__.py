"""Any chain of products, attention and operations on rows as one compiled call, on a CPU."""

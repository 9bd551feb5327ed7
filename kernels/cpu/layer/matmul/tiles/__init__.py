"""Products by the processor's tiles (AMX): blocks of rows, panels, shares, feed-forward."""

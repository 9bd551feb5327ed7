"""KV beyond the pool: pages that other memory, a disk or a server keeps, and how they come back."""

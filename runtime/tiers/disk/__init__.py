"""Pages on a disk: records in files that are only appended to, and an index of them."""

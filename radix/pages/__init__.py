"""The pool of pages: ids with reference counts, handed out in runs of neighbours.

Other rooms use `pool.PagePool` and `errors.OutOfPages`, both through `coppice.radix`.
"""

"""Who owns which page: ids with reference counts, handed out in runs.

Other rooms use `pool.PagePool` and `errors.OutOfPages`, both through `coppice.radix`.
"""

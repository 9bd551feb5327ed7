"""What a tree holds, reported to other processes: events, page by page, and hashes that name pages.

Other rooms use `events` and `page_hashes` through `coppice.radix`, and `changes`, `blocks`, `copy`
and `index`.
"""

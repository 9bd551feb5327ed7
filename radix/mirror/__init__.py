"""What a tree holds, reported to other processes: events, page by page, and hashes that name pages.

Other rooms use `events.PageEvents` and `page_hashes.page_hashes`, both through `coppice.radix`.
"""

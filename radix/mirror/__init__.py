"""What a tree holds, told to others: events and hashes for processes, names of pages for tiers.

Other rooms use `events` and `page_hashes` through `coppice.radix`, and `changes`, `blocks`, `copy`
and `index`.
"""

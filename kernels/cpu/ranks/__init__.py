"""Processes that compute one model together on one machine, and meet in shared memory.

Other rooms use `memory` and `errors`; the compiled layers use `meeting`.
"""

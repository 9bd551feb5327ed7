"""Why tokens missed: each request's computed tokens by cause, and what other pools would hit.

Other rooms use `ledger.Accounting`, its results in `accounts` and `counts`, and
`top_prefixes.PrefixSavings`.
"""

"""Several processes that compute one model: how they start, which cores are theirs, how they speak.

`runtime.runner.member` uses `starting` and `torch_group`; `shared_group` is for ranks on one CPU;
`following` is what the first one tells the others.
"""

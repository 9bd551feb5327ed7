"""The step: requests come in, a batch is scheduled, run and committed, tokens go out.

The frontend uses `core.Engine`; `runtime.report` and `runtime.process` use it too.
"""

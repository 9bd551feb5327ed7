"""Models of the transformers library on our pages: described, checked, loaded and run.

`runtime.runner.implementation` uses `describe` and `loading`.
"""

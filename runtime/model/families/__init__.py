"""Families of models, one file each: how a `config.json` is read, what its layers have.

`runtime.model.config_file` uses `registry`.
"""

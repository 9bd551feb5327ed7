"""The network: its config, its weights, its layers, and where a model is found.

The runner uses `config`, `config_file`, `decoder` and `weights`; the frontend uses `path`.
"""

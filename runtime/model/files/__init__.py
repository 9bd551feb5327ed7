"""Where a checkpoint is, and its tensors by name, whatever kind of files they are stored in.

`opening` chooses the reader; `weights` and the frontend use it, `path` and `folder`.
"""

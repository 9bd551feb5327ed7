"""Requests, scheduler, model and step loop: the only room where the tree and tensors meet."""

from coppice.kernels.cpu.code.threads import calm_waiting_threads

# Here, because it must come before torch is loaded, which every module of this room does.
calm_waiting_threads()

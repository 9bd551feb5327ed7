"""Requests, scheduler, model and step loop: the only room where the tree and tensors meet."""

from coppice.kernels.cpu.code.threads import calm_waiting_threads

# It must run before torch is loaded, and modules of this room load torch.
calm_waiting_threads()

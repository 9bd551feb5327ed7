"""Requests, scheduler, model and step loop: the only room where the tree and tensors meet."""

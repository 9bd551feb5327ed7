"""A forward pass of a transformers model, written down once and then run as one compiled call."""

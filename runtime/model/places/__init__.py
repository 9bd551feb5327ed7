"""Where each tensor of a checkpoint belongs in a decoder, and what copies it there.

`runtime.model.weights` uses `tensors`; `experts` has what holds all experts of a layer.
"""

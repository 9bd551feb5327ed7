"""What of transformers' models is refused since it cannot run on pages, in words for people.

Imports nothing, so that a list of models is there at once; `refusals` and `describe` refuse it.
"""

from __future__ import annotations

#: A kind of models each, with an example of its names or settings.
REFUSED = (
    "layers with a state of their own: state-space (Mamba), linear attention, convolutions",
    "attention that does not pass transformers' interface (Falcon, GPT-J, Bloom)",
    "biases of the attention mask (ALiBi), and tokens that see later ones",
    "encoders, and models that also read pictures or sound",
    "rotations that depend on the length of a sequence (rope_type dynamic)",
    "heads that differ from layer to layer",
    "attention within chunks, and queries that are scaled by their positions (Llama 4)",
    "code from the checkpoint (auto_map)",
)

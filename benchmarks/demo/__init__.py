"""How the demo model is trained: its tokenizer, its network, guided attention, the training run."""

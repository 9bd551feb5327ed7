"""What a model needs and what fits on a device, from its `config.json` alone, without torch."""

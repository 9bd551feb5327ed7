"""A small model beside the model, which proposes drafts from a tree and a KV cache of its own."""

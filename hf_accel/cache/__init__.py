"""A KV cache in blocks. `hf`, which makes it a transformers Cache, is not imported here."""

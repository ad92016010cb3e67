"""A KV cache in blocks. The subpackage `hf` makes it a transformers Cache; it is not imported here."""

"""Drafters: some look drafts up in the text so far, others generate them with a smaller or quantized model."""

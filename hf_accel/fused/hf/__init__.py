"""The seam to transformers: its decoder layers, as a whole."""

"""The seam to transformers' own server code (`transformers.cli.serving`)."""

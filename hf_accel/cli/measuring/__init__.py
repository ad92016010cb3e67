"""Measuring a model on the user's machine: stock and patched in turns, over the same requests."""

"""Checkpoints of other programs: how they store quantized Linears, read and written without going through floats."""

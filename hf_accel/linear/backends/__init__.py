"""The ways to multiply by a quantized weight, a file for each."""

"""Finds such layers in a model of transformers, and computes them over pages."""

"""Checkpoints that other programs load."""

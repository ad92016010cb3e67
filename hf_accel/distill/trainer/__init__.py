"""Distillation inside a transformers Trainer: the callback, the trainer, and what they hook into a model."""

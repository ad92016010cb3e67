"""Losses of distillation in torch alone, with gradients that are computed along with the value."""

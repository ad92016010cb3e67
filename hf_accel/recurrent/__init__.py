"""Layers that keep a state of fixed size: short convolutions, the gated delta rule, state spaces."""

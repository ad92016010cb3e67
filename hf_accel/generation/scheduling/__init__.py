"""Scheduling: which sequences a pass computes, and which wait."""

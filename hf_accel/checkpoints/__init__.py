"""Checkpoints, our own and those of other programs: checked, loaded and written."""

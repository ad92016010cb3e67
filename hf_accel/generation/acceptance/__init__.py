"""Verification of drafts: by token, by block, or with shared random numbers."""

"""Speculative decoding: drafters, the choice of draft lengths, and the verification of drafts."""

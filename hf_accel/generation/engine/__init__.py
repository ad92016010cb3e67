"""Serving: a loop that runs passes in its own thread, and the streams of tokens that it fills."""

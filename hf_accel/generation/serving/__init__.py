"""The loop that computes in a thread of its own, and the streams that come out of it."""

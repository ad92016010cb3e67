"""The errors that hf_accel raises, as types that a program can catch."""


class HfAccelError(Exception):
    """Base of every error that hf_accel raises on purpose."""


class UnsupportedError(HfAccelError, ValueError):
    """An explicit request that cannot be met; the message names the way out."""


class NotRaggedError(UnsupportedError):
    """A pass over tokens of several sequences met something that only stock's loop can do; its results must not be
    used.
    """


class NoTokenError(HfAccelError):
    """The processed scores of a position hold NaN or are all -inf, so that none of its tokens is the likeliest."""


class OutOfBlocksError(HfAccelError, MemoryError):
    """A cache with a fixed number of blocks has none left; nothing was written."""


class LostRankError(HfAccelError, RuntimeError):
    """Another process of this model died, hangs or computes something else, so that the common work cannot end."""


class HfAccelWarning(UserWarning):
    """Something that works, but is very likely not what the user wants."""

"""What can go wrong, as types a program can catch."""


class HfAccelError(Exception):
    """Base of every error that hf_accel raises on purpose."""


class UnsupportedError(HfAccelError, ValueError):
    """An explicit request that cannot be met; the message names the way out."""


class NotRaggedError(UnsupportedError):
    """A pass over the tokens of several sequences met what only stock's loop can do; its results must not be used."""


class OutOfBlocksError(HfAccelError, MemoryError):
    """A cache with a fixed number of blocks has none left; nothing was written."""


class LostRankError(HfAccelError, RuntimeError):
    """Another process of this model died, hangs or did something else, so that what both compute has no end."""


class HfAccelWarning(UserWarning):
    """Something that works but is very likely not what was meant."""

"""C++ kernels for the CPU behind a plain C interface, loaded through ctypes.

src/ holds the sources, build.py compiles them (on `pip install`), library.py loads them and chooses the
instruction set; the other files turn tensors into pointers, one for each family of kernels.
"""

from .library import isa, refusal, threads, using_isa

__all__ = ["isa", "refusal", "threads", "using_isa"]

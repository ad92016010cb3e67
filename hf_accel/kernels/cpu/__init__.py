"""C++ kernels for the CPU behind a plain C interface, loaded through ctypes.

src/ holds the sources, build.py compiles them (on `pip install`), library.py loads them and chooses the
instruction set; the other files turn tensors into pointers, one for each family of kernels. A new kernel is a file
in src/kernels, its struct and a line in src/kernels.h, and the file here that calls it.
"""

from . import attention, elementwise, float_linear, integer_linear, logits  # whose structs the library is checked for
from .library import isa, refusal, threads, using_isa

__all__ = [
    "attention", "elementwise", "float_linear", "integer_linear", "isa", "logits", "refusal", "threads", "using_isa",
]  # fmt: skip

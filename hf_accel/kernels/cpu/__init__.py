"""C++ kernels for the CPU with a plain C interface, loaded through ctypes.

src/ holds the sources. build.py compiles them (during `pip install`). library.py loads the library and chooses the
instruction set. Each of the other files calls a family of kernels with the pointers of its tensors.

To add a kernel, write a file in src/kernels, its struct and a line in src/kernels.h, and a file here that calls it.
"""

# All files with structs are imported, so that the sizes of all structs are checked when the library loads.
from . import (
    attention,
    delta_rule,
    float_linear,
    head_products,
    integer_linear,
    layer_call,
    row_kernels,
    short_conv,
    state_scan,
)
from .library import better_level, isa, refusal, threads, using_isa, warn_of_refusal

__all__ = [
    "attention", "better_level", "delta_rule", "float_linear", "head_products", "integer_linear", "isa", "layer_call",
    "refusal", "row_kernels", "short_conv", "state_scan", "threads", "using_isa", "warn_of_refusal",
]  # fmt: skip

"""What Triton's interpreter computes wrong of bfloat16, put right.

It multiplies matrices of bits as if they were numbers, and rounds towards zero, where a GPU rounds to the nearest.
"""

from __future__ import annotations

from typing import Any


def correct_interpreter() -> None:
    """Call it once in a process whose kernels are interpreted, before the first of them runs."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    np.seterr(all="ignore")  # a GPU does not warn of infinity
    create_dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def corrected_cast(self: Any, src: Any, dst_type: Any) -> Any:
        from_type, to_type = src.dtype.scalar, dst_type.scalar
        if from_type == tl.bfloat16 and to_type != tl.bfloat16:
            wide = TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            return wide if to_type == tl.float32 else cast(self, wide, dst_type)
        if to_type == tl.bfloat16 and from_type != tl.bfloat16:
            bits = np.ascontiguousarray(src.data.astype(np.float32)).view(np.uint32)
            nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
            return TensorHandle(np.where(is_nan, 0x7FFF, nearest).astype(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    def corrected_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (corrected_cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *rest)

    patch_tensor = interpreter._patch_lang_tensor

    def corrected_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Triton 3.6 has an array of one number here, which newer numpys do not take for a number.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = corrected_tensor
    for name, corrected in (("cast_impl", corrected_cast), ("create_dot", corrected_dot)):
        setattr(InterpreterBuilder, name, corrected)

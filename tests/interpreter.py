"""What Triton's interpreter computes wrong of bfloat16, put right, and work of its that has no effect, left out.

It multiplies matrices of bits as if they were numbers, and rounds towards zero, where a GPU rounds to the nearest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
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
    leave_out_what_is_idle(interpreter, tl)
    for name, corrected in (("cast_impl", corrected_cast), ("create_dot", corrected_dot)):
        setattr(InterpreterBuilder, name, corrected)


def leave_out_what_is_idle(interpreter: Any, tl: Any) -> None:
    """Each call of a function patches the language again, each operation makes a table of dtypes.

    Each sum of integers is compared with their range too, for an assertion that is off.
    """
    patch_lang, dtype_of, cached_dtype = (
        interpreter._patch_lang, interpreter._get_np_dtype, cache(interpreter._get_np_dtype),
    )  # fmt: skip

    def patch_once(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        is_patched = languages and all(language.static_print is print for language in languages)
        return interpreter._LangPatchScope() if is_patched else patch_lang(fn)

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar  # a pointer is not hashable
        return cached_dtype(scalar) if type(scalar) is tl.dtype else dtype_of(dtype)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, numpy_dtype
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

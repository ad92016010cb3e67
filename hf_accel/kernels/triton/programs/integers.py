"""Integers in bytes to floats, by instructions that a GPU has many units for: those that convert numbers are few."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # there are no instructions of a GPU then

# Instructions that convert the integers in the bytes of a word. `t` are the integers with an offset, so that none is
# negative; `prmt` puts each behind the upper bytes of a float whose last bits count units; the offset is taken off.
_BYTES = "xor.b32 t, {}, 0x80808080;"
_AND_XOR = "0x0F0F0F0F, 0x08080808, 0x6A;"  # one instruction: what it is given & the first ^ the second
_LOW = f"lop3.b32 t, {{}}, {_AND_XOR}"
_HIGH = f"shr.u32 t, {{}}, 4; lop3.b32 t, t, {_AND_XOR}"


def _words(offset: str) -> tl.constexpr:
    """To 2 ** 23 + t, float32."""
    moves = " ".join(f"prmt.b32 ${byte}, t, 0x4B000000, 0x754{byte};" for byte in range(4))
    return tl.constexpr(f"{{ .reg .b32 t; {offset.format('$4')} {moves} }}")


def _pairs(offset: str, *, upper: str, one: str, less: str, kind: str) -> tl.constexpr:
    """To numbers of 16 bits, two in a word. upper: the upper byte of 2 ** 7 or 2 ** 10; less: what is taken off."""
    moves = " ".join(
        f"prmt.b32 u, t, 0x{upper * 4}, 0x{places}; fma.rn.{kind}x2 ${pair}, u, one, less;"
        for pair, places in enumerate(("4140", "4342"))
    )
    constants = f"mov.b32 one, 0x{one * 2}; mov.b32 less, 0x{less * 2};"
    return tl.constexpr(f"{{ .reg .b32 t, u, one, less; {constants} {offset.format('$2')} {moves} }}")


WORDS, LOW_WORDS, HIGH_WORDS = _words(_BYTES), _words(_LOW), _words(_HIGH)
LOW_BFLOAT16, HIGH_BFLOAT16 = (
    _pairs(offset, upper="43", one="3F80", less="C308", kind="bf16") for offset in (_LOW, _HIGH)
)
LOW_FLOAT16, HIGH_FLOAT16 = (
    _pairs(offset, upper="64", one="3C00", less="E408", kind="f16") for offset in (_LOW, _HIGH)
)


@triton.jit
def floats(integers):
    """Convert int8 to float32. A GPU has few units for that; the last byte of 2 ** 23 + n, n not negative, is n."""
    if INTERPRETED:
        return integers.to(tl.float32)
    else:
        bits = tl.inline_asm_elementwise(WORDS, "=r,=r,=r,=r,r", [integers], dtype=tl.uint32, is_pure=True, pack=4)
        return bits.to(tl.float32, bitcast=True) - 8388736.0  # n + 128 was the byte


@triton.jit
def nibbles(stored, IS_HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Convert the numbers of 4 bits in the low, or the high, halves of bytes to DTYPE, as `floats` does."""
    if INTERPRETED:
        shifted = stored if IS_HIGH else stored << 4
        return (shifted.to(tl.int8, bitcast=True) >> 4).to(tl.float32).to(DTYPE)
    elif tl.float32 == DTYPE:
        words: tl.constexpr = HIGH_WORDS if IS_HIGH else LOW_WORDS
        bits = tl.inline_asm_elementwise(words, "=r,=r,=r,=r,r", [stored], dtype=tl.uint32, is_pure=True, pack=4)
        return bits.to(tl.float32, bitcast=True) - 8388616.0  # n + 8 was the byte
    elif tl.bfloat16 == DTYPE:
        pairs: tl.constexpr = HIGH_BFLOAT16 if IS_HIGH else LOW_BFLOAT16
        return tl.inline_asm_elementwise(pairs, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        pairs: tl.constexpr = HIGH_FLOAT16 if IS_HIGH else LOW_FLOAT16
        return tl.inline_asm_elementwise(pairs, "=r,=r,r", [stored], dtype=tl.float16, is_pure=True, pack=4)

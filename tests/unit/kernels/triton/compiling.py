"""Compile a launch to machine code for a GPU that is not there, with the ptxas that Triton carries."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_accel.kernels.triton.launch import Launch

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # that one block may have, by compute capability
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """Of one thread (registers, and the bytes that it keeps in memory for lack of them) and of one block (shared)."""

    registers: int
    stack: int
    local: int
    shared: int

    def assert_fits(self, capability: int) -> None:
        assert self.stack == 0 and self.local == 0, f"registers spill: {self}"
        assert self.registers <= 255, self
        assert self.shared <= SHARED_BYTES[capability], f"{self} is more than {SHARED_BYTES[capability]} bytes"


def compile_for(launch: Launch, capability: int) -> Usage:
    """Compile as `launch.run()` would on a GPU of this compute capability (80, 89, 90)."""
    names = launch.kernel.arg_names
    signature, attributes = {}, {}
    constants = launch.constants_for(overlaps=capability >= 90)
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = launch.arguments[name]
        varies = launch.kernel.params[names.index(name)].do_not_specialize
        signature[name], divisible = ("i32", False) if varies else _type_of(value)
        if signature[name] == "constexpr":
            constants[name] = value
        elif divisible:
            attributes[(names.index(name),)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    return _usage(compiled.asm["cubin"], compiled.metadata.shared)


def _type_of(value: object) -> tuple[str, bool]:
    """Triton's name of an argument's type, and whether it is divisible by 16, as Triton specializes it."""
    if value is None:
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}", True
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, int):
        if value == 1:
            return "constexpr", False
        return ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0
    assert isinstance(value, float), value
    return "fp32", False


def _usage(cubin: bytes, shared: int) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(number) for key, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed)}
    return Usage(found["REG"], found["STACK"], found["LOCAL"], shared)

"""Calls a whole layer, whose operations are kernels one after the other."""

from __future__ import annotations

from ctypes import Structure

from .library import ScoreBias, fields, kernel

# LayerOpKind in kernels.h
OPERATIONS = (
    "integer_linear", "float_linear", "norm", "rope", "write", "attend", "add", "layer_norm", "attend_rows", "gate",
    "join",
)  # fmt: skip
INPUT, OUTPUT = 0, 1  # the buffers that are tensors of the caller


class LayerCall(Structure):
    _fields_ = [
        *fields(
            pointers="ops starts", sizes="count width", pointers_="x out cos sin",
            sizes_="tokens batch table_batch table_token",
            pointers__="k_pages v_pages k_scales v_scales slots block_table cu_q kv_len",
            sizes__="table_stride sequences block_size",
        ),
        ("score_bias", ScoreBias),
        *fields(ints="dtype table_dtype page_dtype scale_dtype threads"),
    ]  # fmt: skip


run_layer = kernel("layer", LayerCall)

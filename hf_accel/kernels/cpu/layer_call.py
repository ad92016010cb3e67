"""Calls a whole layer, whose operations are kernels one after the other; their structs are those of src/layer.h."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import Structure
from typing import Any

from .library import ScoreBias, fields, kernel, packed_format, shared_struct

# LayerOpKind in layer.h
OPERATIONS = (
    "integer_linear", "float_linear", "norm", "rope", "write", "attend", "add", "layer_norm", "attend_rows", "gate",
    "join", "position_scores", "attend_source", "short_conv", "delta_rule", "state_scan", "gated_norm",
    "bias_gates", "row_conv", "multiply", "page_conv", "head_products", "by_position",
)  # fmt: skip
KINDS = {name: number for number, name in enumerate(OPERATIONS)}


class Columns(Structure):
    _fields_ = fields(sizes="buffer offset stride head")


NOWHERE = Columns()


@shared_struct
class LayerOp(Structure):
    _fields_ = [
        *fields(ints="kind weight_dtype"),
        *[(place, Columns) for place in ("x", "y", "out", "out2", "z")],
        *fields(
            pointers="weight bias skip", sizes="heads kv_heads dim value_dim window ahead",
            floats="eps offset scale softcap",
            ints="round_first interleaved round_each tile_rows bias_dtype skip_dtype gate_first activation",
        ),
    ]  # fmt: skip


class SourcePages(Structure):
    """The pages of an encoder's output, and what attention reads of them; see SourcePages in kernels.h."""

    _fields_ = fields(
        pointers="k_pages v_pages k_scales v_scales block_table cu_q kv_len", sizes="table_stride sequences block_size"
    )


class StatePages(Structure):
    """The states of fixed size that operations of a layer read and write; see StatePages in kernels.h."""

    _fields_ = fields(pointers="states kept slots starts before limited", sizes="sequences")


NO_SOURCE, NO_STATES = (0,) * len(SourcePages._fields_), (0,) * len(StatePages._fields_)


class LayerCall(Structure):
    """Its fields are those of LayerCall in kernels.h."""

    _fields_ = [
        *fields(
            pointers="ops starts", sizes="count width", pointers_="given x out cos sin",
            sizes_="tokens batch table_batch table_token",
            pointers__="k_pages v_pages k_scales v_scales slots written block_table cu_q kv_len",
            sizes__="table_stride sequences block_size num_written",
        ),
        ("score_bias", ScoreBias),
        *fields(pointers="position_keys position_queries position_rows"),
        ("source", SourcePages),
        ("states", StatePages),
        *fields(pointers___="adapters"),
        *fields(ints="dtype table_dtype page_dtype scale_dtype threads"),
    ]  # fmt: skip


class DraftedSequence(Structure):
    _fields_ = fields(sizes="rows before position steps nodes")


class DraftCall(Structure):
    """Its fields are those of DraftCall in draft.h."""

    _fields_ = fields(
        pointers="parts embeddings known cos sin", sizes="hidden tokens table_size",
        pointers_="sequences ids states", sizes______="pieces", pointers_____="out drafted",
        sizes_="num_sequences steps width",
        pointers__="k_pages v_pages k_scales v_scales block_table", sizes__="table_stride block_size",
        ints="page_dtype scale_dtype threads is_own draw", floats="temperature top_p", sizes___="top_k",
        pointers___="numbers probabilities", sizes____="vocabulary", pointers____="spare parents counts",
        sizes_____="most_nodes num_spare",
    )  # fmt: skip


run_layer = kernel("layer", LayerCall)
run_draft = kernel("draft", DraftCall)


def layer_calls(calls: Sequence[tuple[int, ...]]) -> Any:
    """Return an array of LayerCalls with these fields."""
    pack = struct.Struct(packed_format(LayerCall)).pack
    return (LayerCall * len(calls)).from_buffer_copy(b"".join(pack(*each) for each in calls))

"""Calls a whole layer, whose operations are kernels one after the other; their structs are those of src/layer.h."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from ctypes import Structure
from itertools import chain, pairwise
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
            ints="round_first interleaved round_each tile_rows bias_dtype skip_dtype gate_first activation "
            "halves_in halves_out",
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


# The parts of a LayerCall: its operations, and what these may be given in a call. Each is packed alone, because layers
# share many of them.
CALL_PARTS: dict[str, list[tuple[str, Any]]] = {
    "operations": fields(pointers="ops starts", sizes="count width"),
    "given": fields(pointers="given"),
    "rows": fields(pointers="x out"),
    "tables": fields(pointers="cos sin", sizes="tokens batch table_batch table_token"),
    "pages": fields(pointers="k_pages v_pages k_scales v_scales"),
    "step": fields(
        pointers="slots written block_table cu_q kv_len", sizes="table_stride sequences block_size num_written"
    ),
    "score_bias": [("score_bias", ScoreBias)],
    "positions": fields(pointers="position_keys position_queries position_rows"),
    "source": [("source", SourcePages)],
    "states": [("states", StatePages)],
    "adapters": fields(pointers="adapters"),
    "dtypes": fields(ints="dtype table_dtype"),
    "page_dtypes": fields(ints="page_dtype scale_dtype"),
    "threads": fields(ints="threads"),
}
Parts = dict[str, bytes]  # packed, by these names


class LayerCall(Structure):
    """Its fields are those of LayerCall in kernels.h."""

    _fields_ = [*chain.from_iterable(CALL_PARTS.values())]


def _packs() -> Iterator[tuple[str, struct.Struct]]:
    places = [getattr(LayerCall, members[0][0]).offset for members in CALL_PARTS.values()]
    sizes = [end - start for start, end in pairwise([*places, ctypes.sizeof(LayerCall)])]
    for (name, members), size in zip(CALL_PARTS.items(), sizes, strict=True):
        kind = type(name, (Structure,), {"_fields_": members})
        yield name, struct.Struct(f"{packed_format(kind)}{size - ctypes.sizeof(kind)}x")


_PACKS = dict(_packs())
NO_PARTS: Parts = {name: bytes(pack.size) for name, pack in _PACKS.items()}


def pack_parts(**parts: tuple[int, ...]) -> Parts:
    """Pack the fields of parts of a LayerCall."""
    return {name: _PACKS[name].pack(*values) for name, values in parts.items()}


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


run_layer = kernel("layer", LayerCall, pack=lambda parts: b"".join(parts.values()))  # of all parts
run_draft = kernel("draft", DraftCall)


def layer_calls(calls: Sequence[Parts]) -> Any:
    """Return an array of LayerCalls with these parts."""
    return (LayerCall * len(calls)).from_buffer_copy(b"".join(b"".join((NO_PARTS | each).values()) for each in calls))

"""A recurrent layer as one native call over pages, from its first linear layer to its last."""

from __future__ import annotations

from torch import Tensor

from ..cache.kinds.states import StateStep
from ..fused.layer_programme import MOST_TOKENS, NO_STEP, NativeOperations, StateFields
from ..fused.traced_layer import Attention
from ..kernels.cpu.attention import NO_BIAS
from ..kernels.cpu.layer_call import NO_SOURCE, run_layer
from ..kernels.cpu.library import DTYPES, threads
from ..kernels.layouts import KV
from ..recognition.operation import OUTPUT, Span
from ..recognition.trace import Trace


class RecurrentProgramme(NativeOperations):
    """The operations of a recurrent layer, which its Recurrence recorded, as one native call.

    Each is the kernel that is called where the layer runs step by step: the bits are the same. It holds addresses.
    """

    over_rows = False

    def __init__(self, trace: Trace, out: Span) -> None:
        super().__init__(trace, None, Attention(0.0), trace.device)
        self.max_tokens, self.out_width = MOST_TOKENS, out.stride
        self.operations[-1].outputs[0] = Span(OUTPUT, 0, out.stride)
        self.compile(trace.widths)

    def __call__(self, x: Tensor, pages: KV, states: StateStep) -> Tensor:
        """x: [B, Q, hidden], contiguous, of tokens without padding -> [B, Q, hidden]. pages: of the layer's states."""
        batch, row = x.shape[:2]
        out = x.new_empty(batch, row, self.out_width)
        dtype = DTYPES[self.dtype]
        run_layer(
            *self._fixed, 0, x.data_ptr(), out.data_ptr(), 0, 0, batch * row, batch, 0, 0,
            0, 0, 0, 0, *NO_STEP, *NO_BIAS, 0, 0, 0, *NO_SOURCE,
            pages.k.data_ptr(), pages.v.data_ptr(), *StateFields.of(states).step, 0,
            dtype, 0, dtype, dtype, threads(),
        )  # fmt: skip
        return out

"""A recurrent layer as one native call over pages, from its first linear layer to its last."""

from __future__ import annotations

from torch import Tensor

from ..cache.kinds.states import StateStep
from ..fused.layer_programme import MOST_TOKENS, NativeOperations, of_rows, of_states
from ..fused.traced_layer import Attention
from ..kernels.cpu.layer_call import pack_parts
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
        out = x.new_empty(*x.shape[:2], self.out_width)
        self.run(pack_parts(rows=(x.data_ptr(), out.data_ptr())) | of_rows(x) | of_states(pages, states))
        return out

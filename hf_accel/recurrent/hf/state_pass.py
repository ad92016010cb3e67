"""Layers with recurrent states over pages, whatever they compute: each token's result needs the state after the token
before it.

So their states stay in pages of one token each: tokens of many sequences can stand in one row, and drafts, copies and
preemption need nothing of their own. A token's numbers are the same whatever else is in the pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from ...cache.hf import CacheOverPages, RaggedCache, RecurrentPass
from ...cache.hf.cache_argument import STATES_NAME
from ...cache.kinds.states import StateGroup
from ...cache.pages import Pages
from ...cache.step import TokenRange
from ...errors import UnsupportedError
from ...fused.hf.own_code import padding_refusal
from ...fused.kept_states import KeptStates
from ...kernels import cpu
from ...kernels.cpu import short_conv, state_scan
from ...kernels.cpu.library import FLOATS, native
from ...recognition.operation import INPUT, Span, UntraceableError
from ...recognition.stand_ins import StandIn
from ...recognition.trace import Trace
from ...recognition.trial import Tolerance, agree
from ...recognition.unchanged import Hooks, Reads, is_unobserved, replaced_in
from ...tensors import is_recorded
from ...undo.journal import Mixin, original_class
from ...undo.state import FUSED
from ..gated_norms import GATE_ACTIVATIONS, GatedNorm
from ..recurrent_programme import RecurrentProgramme
from .convolutions import OTHER_ARGUMENTS, PagedForward, causal_refusal, require_pages
from .recorded_parts import input_of, note_kept, settings_of_parts, with_parts

NUM_PROMPT = 5  # tokens of the prompt of a trial


class PagedRecurrence(PagedForward):
    """A mixin for a layer with a recurrent state, whose Recurrence says what it computes."""

    def over_pages(
        self, hidden_states: Tensor, cache: CacheOverPages, attention_mask: Tensor | None, others: dict[str, Any]
    ) -> Any:
        return over_pages(self, hidden_states, cache, others)


def over_pages(module: Any, hidden_states: Tensor, cache: CacheOverPages, given: dict[str, Any]) -> Tensor:
    """Compute a layer whose state is in the pages of a cache: [B, Q, H] -> [B, Q, H].

    given: the other keywords of the call. Raises what `PagedRecurrence.forward` raises.
    """
    known: Recurrence = vars(module)[FUSED]
    require_pages(module, known.refusal(module), given)
    layer, sizes = cache.state_layer(known.layer_of(module)), known.sizes(module)
    found: RecurrentPass = layer.states(hidden_states, sizes)
    positions = given.get("position_ids") if known.reads_positions else None
    if positions is not None:
        columns = positions.expand(hidden_states.shape[:2])[:, None, :, None]
        found = replace(found, positions=found.step.tokens(columns).view(-1))
    if known.computes_padding and found.step.token_columns is not None:
        raise UnsupportedError(padding_refusal(module, known.layer_of(module)))
    whole = known.in_one_call(module, hidden_states, found)
    if whole is not None:
        layer.pass_done(found.step)
        return whole
    # Padding has no state: in transformers it changes none before a sequence's first token.
    row = found.step.tokens(hidden_states[:, None]).transpose(0, 1)
    core = known.compute(module, row, found)
    layer.pass_done(found.step)
    out = known.finished(module, core.to(hidden_states.dtype)[None])
    return found.step.columns(out.transpose(0, 1), len(hidden_states)).squeeze(2)


class Recurrence(KeptStates):
    """A kind of recurrent layer: it computes modules over pages, and says why it cannot compute one.

    mixin: the forward that the module gets. reads_positions: whether `compute` needs the positions of tokens.
    computes_padding: whether transformers takes padding for tokens, so that it changes states. stays_with_row: whether
    transformers leaves a state in its row of a batch when the row's beam goes on in another one. norm: how the norm of
    the module computes. norm_name, last: the names of the norm, and of the linear layer behind it.
    A copy or a pickle has asked nothing yet, since it holds other modules.
    """

    mixin: ClassVar[type[Mixin]] = PagedRecurrence
    reads_positions: ClassVar[bool] = False
    computes_padding: ClassVar[bool] = False
    stays_with_row: ClassVar[bool] = False
    mixes_rows: bool = False
    norm_name: ClassVar[str] = "norm"
    last: ClassVar[str] = "out_proj"

    def __init__(self, norm: GatedNorm) -> None:
        self.norm = norm
        self._asked: tuple[Reads, Hooks] | None = None
        self._programme: RecurrentProgramme | None = None
        self._unrecorded: tuple[torch.dtype, Reads] | None = None  # what a layer without a programme depends on

    def __reduce__(self) -> Any:
        return type(self), (self.norm,)

    def refusal(self, module: nn.Module) -> str | None:
        """Return why our forward cannot compute the module, as one clause; None if it can.

        Where all that the answer depends on is as it was, it is not asked again.
        """
        if self._asked is not None:
            reads, hooks = self._asked
            if reads.hold() and not hooks.any_others():
                return None
        self._asked, modules = None, with_parts(module)
        refusal = replaced_in(modules) or self.asked(module)
        if refusal is None:
            self._asked = Reads(settings_of_parts(module)), Hooks(modules[1:])
        return refusal

    def in_one_call(self, module: Any, x: Tensor, found: RecurrentPass) -> Tensor | None:
        """Compute what the module gives for x [B, Q, H], by one native call; None if this pass has none."""
        tokens = x.shape[0] * x.shape[1]
        if found.group_step.written is not None or len(found.states.slots) != tokens or not native(x):
            return None  # with padding, there are fewer tokens than columns
        programme = self._ready(module, x)
        if programme is None or not 0 < tokens <= programme.max_tokens or not programme.is_unobserved():
            return None
        return programme(x.contiguous(), found.storage.pages, found.states)

    def _ready(self, module: Any, x: Tensor) -> RecurrentProgramme | None:
        """Return the programme of the module for inputs of this dtype; None if it has none."""
        if self._programme is not None and self._programme.dtype is x.dtype and self._programme.is_current():
            return self._programme
        if self._unrecorded is not None and self._unrecorded[0] is x.dtype and self._unrecorded[1].hold():
            return None
        trace, width = Trace(x.dtype), x.shape[-1]
        trace.widths[INPUT] = width
        trace.reads += settings_of_parts(module)
        self._programme = self._unrecorded = None
        try:
            out = self.record(module, StandIn(trace, Span(INPUT, 0, width), width))
            self._programme = RecurrentProgramme(trace, out.span)
        except UntraceableError:
            self._unrecorded = x.dtype, Reads(trace.reads)
        return self._programme

    def recorded(self, trace: Any, module: Any, *args: Any, **given: Any) -> StandIn:
        x = input_of(trace, args, given, cache=STATES_NAME, others=OTHER_ARGUMENTS)
        if trace.stateful is not None:
            raise UntraceableError("it keeps more than one state")
        if self.refusal(module) is not None:
            raise UntraceableError("its recurrent module was changed")
        note_kept(trace, module)
        trace.stateful = self, module
        return self.record(module, x)

    def record(self, module: Any, x: StandIn) -> StandIn:
        """Record what the module computes of x as operations of its trace. Raises UntraceableError if it cannot."""
        raise UntraceableError("it has no native call")

    def record_norm(self, norm: Any, x: StandIn, gate: StandIn, *, parts: int) -> StandIn:
        """Record the norm of `parts` of each row, and its gate.

        norm: None where there is the gate alone. x: float32.
        """
        form = self.norm
        if form.groups and not self._norm_is(norm):
            raise UntraceableError("its norm was changed")
        weight = norm._parameters["weight"] if form.groups else None
        trace: Any = x.trace
        if norm is not None:
            trace.visit(norm)
        size = gate.width // parts
        recorded: StandIn = trace.put(
            "gated_norm", [x, gate], gate.width, heads=parts, dim=size, eps=form.eps, weight=weight,
            value_dim=size if parts == form.groups else 0, round_first=False, gate_first=form.gate_first,
            activation=form.activation,
        )  # fmt: skip
        return recorded

    def layer_of(self, module: Any) -> int:
        index: int = module.layer_idx
        return index

    def has_limits(self, module: Any) -> bool:
        """Return whether the module computes tokens of a prompt otherwise than generated ones."""
        return False

    def _norm_is(self, norm: Any) -> bool:
        """Return whether a norm still has the eps and the activation that were tried."""
        own = vars(norm)
        same = own.get("variance_epsilon", self.norm.eps) == self.norm.eps
        return same and GATE_ACTIVATIONS.get(own.get("activation", self.norm.activation)) == self.norm.activation

    @abstractmethod
    def asked(self, module: Any) -> str | None:
        """Return why our forward cannot compute the module, as one clause, of what it holds now; None if it can."""

    @abstractmethod
    def compute(self, module: Any, x: Tensor, found: RecurrentPass) -> Tensor:
        """Compute what the module gives to its last layer for the tokens [1, N, H] of a pass: [N, D]."""

    def finished(self, module: Any, core: Tensor) -> Tensor:
        """Return what the module returns [1, N, H] for what `compute` gives, [1, N, D]."""
        out: Tensor = module._modules[self.last](core)
        return out

    def normed(self, norm: Any, x: Tensor, gate: Tensor) -> Tensor:
        """Compute norm(x, gate) for rows [M, D] of float32, with torch's operators where torch has to see them.

        norm: is not read where there is the gate alone.
        """
        if not self.norm.groups and is_native(x):
            return self.norm(x, gate, None)
        if is_native(x) and self.norm.groups and is_unobserved(norm) and self._norm_is(norm):
            return self.norm(x, gate, norm._parameters["weight"])
        if not self.norm.groups:
            return x * nn.functional.silu(gate.float())
        return self._by_torch(norm, x, gate)

    def _by_torch(self, norm: Any, x: Tensor, gate: Tensor) -> Tensor:
        """Compute norm(x, gate) with the module's own code."""
        result: Tensor = norm(x[None], gate[None])[0]
        return result


def is_native(x: Tensor) -> bool:
    """Return whether our kernels may compute from x: torch does not have to see it."""
    return x.is_cpu and x.dtype in FLOATS and not is_recorded() and not x.requires_grad and cpu.refusal() is None


def short_convolution_refusal(module: Any, name: str = "conv1d") -> str | None:
    """Return why the short convolution in front of a recurrence cannot be ours, as one clause; None if it can."""
    conv = module._modules.get(name)
    refusal = causal_refusal(conv)
    if refusal is None and (conv.weight.dtype not in FLOATS or conv.kernel_size[0] < 2):
        refusal = f"its convolution is over {conv.kernel_size[0]} tokens in {conv.weight.dtype}"
    return refusal


def activation_refusal(module: Any) -> str | None:
    """Return why the activations of a recurrence cannot be ours, as one clause; None if they can."""
    named = getattr(module, "activation", "silu")
    return None if named in ("silu", "swish") else f"it has the activation {named!r}"


def scan_refusal(module: Any) -> str | None:
    """Return why the scan of a state space behind in_proj and a convolution cannot be ours; None if it can."""
    refusal = short_convolution_refusal(module)
    # In transformers padding is zeros in front of in_proj, and a bias would make it something else behind it.
    if refusal is None and getattr(module.in_proj, "bias", None) is not None:
        refusal = "its in_proj has a bias"
    return refusal or activation_refusal(module)


def convolved(inputs: short_conv.ConvInputs, found: RecurrentPass) -> Tensor:
    """Compute the short convolution in front of a recurrence for the tokens of a pass: [N, C] float32."""
    convolve = short_conv.short_conv if is_native(inputs.x) else short_conv.reference
    channels, length = inputs.weight.shape
    return convolve(inputs, kept=found.storage.pages[1].view(-1, length - 1, channels), **found.states.places)


def scanned(inputs: state_scan.ScanInputs, found: RecurrentPass, places: dict[str, Tensor] | None = None) -> Tensor:
    """Compute the scan of a state space for the tokens of a pass: [N, H, P] float32.

    places: where the states are, see delta_rule; None for those of the pass.
    """
    scan = state_scan.state_scan if is_native(inputs.x) else state_scan.reference
    _, heads, dim = inputs.x.shape
    states = found.storage.pages[0].view(-1, heads, inputs.b.shape[2], dim)
    return scan(inputs, states=states, **(found.states.places if places is None else places))


def passes_agree(
    known: Recurrence,
    theirs: Any,
    ours: Any,
    x: Tensor,
    *,
    generated: Callable[[Any, Tensor, int], Tensor] | None = None,
) -> bool:
    """Return whether passes over pages give for x [B, 9, H] what a layer's own code gives.

    theirs, ours: two twins of the layer, of which the second is computed by `known`. generated: computes by the
    layer's own code a prompt of so many tokens, and the others behind it; None for `as_generated`.
    """
    vars(ours)[FUSED] = known
    return agree(
        lambda: (generated or as_generated)(theirs, x, NUM_PROMPT),
        lambda: in_passes(ours, x, (NUM_PROMPT, 1, 3), num_prompt=NUM_PROMPT),
        Tolerance(roundings=64, absolute=1e-4),
    )


def as_generated(module: nn.Module, x: Tensor, num_prompt: int) -> Tensor:
    """Compute x [B, Q, H] by the module's own code over transformers' cache: a prompt, and the others one by one."""
    given = {STATES_NAME: Cache(layers=[LinearAttentionLayer()])}
    parts = [x[:, :num_prompt], *x[:, num_prompt:].split(1, dim=1)]
    return torch.cat([original_class(module).forward(module, part, **given) for part in parts], dim=1)


def in_passes(module: Any, x: Tensor, counts: tuple[int, ...], *, num_prompt: int) -> Tensor:
    """Compute x [B, Q, H] in passes over so many tokens of each sequence, of which the first are a prompt."""
    pages = Pages([StateGroup(num_blocks=2, growable=True)])
    cache, sequences = RaggedCache(pages.groups, [(0,)]), [pages.begin() for _ in x]
    results, start = [], 0
    for count in counts:
        for sequence in sequences:
            pages.append(sequence, count)
        cache.step = pages.step([TokenRange(each, start, count, num_prompt=num_prompt) for each in sequences])
        positions = torch.arange(start, start + count).repeat(len(x))[None]
        row = x[:, start : start + count].reshape(1, -1, x.shape[-1])
        part = over_pages(module, row, cache, {"position_ids": positions})
        results.append(part.view(len(x), count, -1))
        start += count
    return torch.cat(results, dim=1)

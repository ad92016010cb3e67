"""The attention of traced layers, as it is called: to the tokens of a sequence, and to the output of an encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import NoneType

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...attention import AttentionSpec, PlannedAttention
from ...attention.cpu import CpuBackend
from ...attention.hf.forward import KNOWN_KEYWORDS, NOT_OURS
from ...attention.hf.operator_pass import OperatorAttention
from ...attention.hf.stock import EAGER, name_before_patch, replaced_function, stock_function
from ...recognition.operation import Operation, UntraceableError
from ...recognition.symbols import TOKENS, TOKENS_BEFORE
from ...recognition.trace import Trace
from ...undo.running_code import running_code
from ...undo.state import BACKEND_ATTRIBUTE, FUSED
from ..native_operation import sinks_of
from ..traced_layer import Attention

# The one call by which attention makes its bias of positions; attention/hf/bias.py makes a table of it.
GIVEN = {"device": torch.device("cpu"), "past_seen_tokens": TOKENS_BEFORE}
OWN_BIAS = "compute_bias", (TOKENS, TOKENS), GIVEN


def operators_within(module: nn.Module) -> OperatorAttention | None:
    """Return what is known of a module that attends by operators; None for any other."""
    known = vars(module).get(FUSED)
    return known if isinstance(known, OperatorAttention) else None


def planned_attention(module: nn.Module) -> PlannedAttention | None:
    """Return what was planned for an attention module; None if nothing was."""
    known = operators_within(module)
    if known is not None:
        return None if known.backend is None or known.spec is None else PlannedAttention(known.backend, known.spec)
    planned: PlannedAttention | None = vars(module).get(BACKEND_ATTRIBUTE)
    return planned


def note_plan(trace: Trace, module: nn.Module) -> None:
    """Note that what was planned for an attention module must not change, nor the function in whose place it stands.

    Raises UntraceableError if others have replaced that.
    """
    for name in (FUSED, BACKEND_ATTRIBUTE):
        trace.note(vars(module), name, vars(module).get(name))
    name, function = name_before_patch(module), stock_function(module)
    if function is None:
        return
    if replaced_function(module) is not None:
        raise UntraceableError("others have replaced the attention that it has without ours")
    note_registered(trace, name)
    for lookup in running_code(function).lookups:
        if isinstance(lookup.owner, dict):
            trace.note(lookup.owner, lookup.name, lookup.value)


def note_registered(trace: Trace, name: str) -> None:
    """Note that transformers must find the same attention function by a name."""
    for owner in (ALL_ATTENTION_FUNCTIONS._local_mapping, ALL_ATTENTION_FUNCTIONS._global_mapping):
        trace.note(owner, name, owner.get(name))


def planned_of(trace: Trace, layer: nn.Module) -> PlannedAttention:
    """Return what was planned for a layer's attention, and note that it must not change. Raises UntraceableError."""
    module = next((each for o in trace.operations if o.kind == "attend" for each in o.modules), layer)
    planned = planned_attention(module)
    note_plan(trace, module)
    if planned is None:
        raise UntraceableError("its attention has another backend")
    return planned


def planned_source(module: nn.Module) -> AttentionSpec | None:
    """Return the spec of the attention to an encoder's output; None if no kernel of ours computes it."""
    planned = planned_attention(module)
    return planned.spec if planned is not None and isinstance(planned.backend, CpuBackend) else None


def source_attention(trace: Trace, spec_of: Callable[[nn.Module], AttentionSpec | None]) -> Attention | None:
    """Return the attention of a trace to an encoder's output, which must be the planned one; None if it has none.

    spec_of: gives what was planned for an attention module.
    """
    found = [operation for operation in trace.operations if operation.kind == "attend_source"]
    if not found and trace.source is None:
        return None
    if len(found) != 1 or trace.source is None:
        raise UntraceableError("it does not attend once to an encoder's output")
    (operation,) = found
    (module,) = operation.modules
    note_plan(trace, module)
    values, spec = operation.values, spec_of(module)
    softcap = values["options"].get("softcap")
    heads = (values["heads"], values["kv_heads"], values["dim"], values["value_dim"], softcap, False)
    if spec is None or _planned_heads(spec) != heads:
        raise UntraceableError("its attention to an encoder's output is not the one that was planned")
    return Attention(_scale_of(operation) * values["factor"], softcap)


def _planned_heads(spec: AttentionSpec) -> tuple[object, ...]:
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.softcap, spec.sinks


def heads_of_keys(spec: AttentionSpec) -> tuple[int, int, int]:
    return spec.num_kv_heads, spec.head_dim, spec.value_dim


def attention_of(trace: Trace, spec: AttentionSpec) -> Attention:
    """Return the trace's attention by the rules of our attention function; it must be the planned one."""
    if trace.layer_idx is None:
        raise UntraceableError("it does not attend over the cache")
    operation, scale, causal = attend_of(trace)
    values = operation.values
    softcap, dim = values["options"].get("softcap"), values["dim"]
    sinks = sinks_of(operation)
    if sinks is not None and (trace.device.type != "cpu" or sinks.parameter.numel() != values["heads"]):
        raise UntraceableError("its attention is given sinks")
    called = (values["heads"], values["kv_heads"], dim, values["value_dim"])
    heads = (*values.get("made", called), softcap, sinks is not None)
    same = _planned_heads(spec) == heads and (spec.bias is values["biased"] or not trace.tried)
    if not same or not causal:
        raise UntraceableError("its attention is not the one that was planned")
    if values["own_bias"] is not None and not values["own_bias"].is_call_of(*operation.modules, *OWN_BIAS):
        raise UntraceableError("it computes a bias of positions in a way of its own")
    return Attention(scale * values["factor"], softcap, spec.window)


def as_called(spec: AttentionSpec, operation: Operation) -> AttentionSpec:
    """Return the spec of an operation's attention, which differs from the planned one where keys are compressed."""
    values = operation.values
    if "made" not in values:
        return spec
    heads, kv_heads, dim, value_dim = (values[name] for name in ("heads", "kv_heads", "dim", "value_dim"))
    return replace(spec, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, value_dim=value_dim)


def attend_of(trace: Trace) -> tuple[Operation, float, bool]:
    """Return the attention among a trace's operations, the scale of its scores, and whether it is causal."""
    operation: Operation = next(o for o in trace.operations if o.kind == "attend")
    scale, causal = _scale_of(operation), trace.tried or operation.values["options"].get("is_causal")
    if causal is None:
        (module,) = operation.modules
        causal = getattr(module, "is_causal", True)
        trace.note(vars(module), "is_causal", vars(module).get("is_causal"))
    return operation, scale, bool(causal)


def sees_all(operation: Operation, *, masked: bool) -> bool:
    """Return whether a query sees all keys but those that a call's mask hides, although torch's attention is causal
    where no module says that it is not: with a mask it is not, and transformers' eager one never is.
    """
    if operation.values["options"].get("is_causal") is not None:
        return False
    if masked:
        return not any(hasattr(module, "is_causal") for module in operation.modules)
    return all(name_before_patch(module) == EAGER for module in operation.modules)


def _scale_of(operation: Operation) -> float:
    """Return the scale of the scores of an attention, which must be given nothing that is not known."""
    options = operation.values["options"]
    unknown = [n for n, value in options.items() if n not in KNOWN_KEYWORDS and value is not None]
    used = [n for n in NOT_OURS if options.get(n) and options[n] is not sinks_of(operation)]
    if unknown or used:
        raise UntraceableError(f"its attention is given {(unknown + used)[0]}=")
    scale = options.get("scaling")
    if not isinstance(scale, (int, float, NoneType)):
        raise UntraceableError("it scales by more than a number")
    return operation.values["dim"] ** -0.5 if scale is None else float(scale)

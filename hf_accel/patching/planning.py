"""make_plan: every choice about a model. Reads the model, never writes to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import attention as attention_backends
from ..attention.cpu import CpuBackend
from ..attention.hf.stock import stock_parts
from ..config import PatchConfig, WeightConfig
from ..errors import UnsupportedError
from ..fused.hf.encoder_sites import encoder_sites
from ..fused.hf.head_sites import with_trained_head
from ..fused.hf.operator_models import OperatorModel, operator_sites
from ..fused.hf.sites import fused_sites, layer_sites, native_linears
from ..fused.kept_states import Keepers, Recorded
from ..fused.measured_rows import rows_here
from ..fused.modules import has_library
from ..fused.modules import refusal as refuses_operators
from ..fused.site import Dropped
from ..generation.hf.drafting import refuse_drafts
from ..hardware import UNLIMITED, bandwidth_here
from ..kernels import triton
from ..kernels.cpu.library import FLOATS
from ..linear import ExpertWeights, QuantModule, Workers
from ..linear.backends.measured_tiles import Measuring
from ..linear.hf import stored_experts
from ..models import is_within, reading_once
from ..parallel.context import context_parallel
from ..parallel.tensor import TensorParallel, check_split
from ..recognition.linear_code import is_plain_conv1d
from ..tensors import model_device
from .attention_survey import (
    attends_in_decoder_alone,
    attention_modules,
    attention_sites,
    loop_refusal,
    model_attention_refusal,
)
from .calibration.bit_budget import eight_bit_names
from .calibration.folds import find_folds
from .calibration.windows import check_takes_ids
from .check import check_calibration, check_in_memory, check_model
from .explain import explain
from .nf4_model import check_takes_nf4
from .originals import Stored, checkpoint_files, parameter_bytes, readable
from .over_pages import InnerGenerator, decoder_form, inner_generator, no_pages, with_given, with_pages, with_readers
from .plan import AttentionPlan, FindOriginals, FusedPlan, Plan
from .sequence_survey import kept_states
from .servers import Server, servers_of
from .survey import check_other_quantizer, input_embedding, split_of
from .twin import twin
from .weight_plan import Backends, WeightPlan, weight_plans

OWN_FORWARD = "the forward of a linear layer in it is not nn.Linear's"


@reading_once
def make_plan(
    model: object,
    config: PatchConfig,
    *,
    find_originals: FindOriginals | None = None,
    eight_bits: Collection[str] = (),
) -> Plan:
    """Return the Plan for a model. Raises UnsupportedError where an explicit request cannot be met.

    find_originals: says which file holds each weight that will be replaced, or None unless all can be read back;
        without it the checkpoint that the model came from is compared. eight_bits: names of Linears that average_bits
        leaves 8 bits for.
    """
    inner = check_model(model)
    split = _checked_split(inner, config)
    stock_attention = _refusal(
        "attention", config, model_attention_refusal(inner), wanted=config.attention is not None
    )
    generator = inner_generator(inner, config)
    stock_cache = _stock_cache(inner, config, generator)
    _check_weights(inner, config)
    linears = tuple(plan_linears(inner, config.weights, eight_bits=eight_bits, row_invariant=config.deterministic))
    attention = () if stock_attention else tuple(_plan_attention(inner, config))
    stock_loop = _stock_loop(inner, config, stock_cache)
    context = context_parallel(inner, config, stock_attention or stock_loop) if config.context_parallel else None
    before = parameter_bytes([*inner.parameters(), *inner.buffers()])
    bandwidth = bandwidth_here(str(model_device(inner)), torch.get_num_threads())
    read_before, read_after = _bytes_read(inner, ()), _bytes_read(inner, linears)
    form = decoder_form(inner, stock_cache, stock_loop)
    over_pages, states = ((), {}) if stock_loop or context else (attention, kept_states(inner))
    fused = _plan_fused(inner, config, linears, attention=over_pages, operators=form.operators, states=states)
    fused = with_readers(inner, linears, fused, ours=stock_attention is None)
    plan = Plan(
        model=inner,
        title=f"{type(inner).__name__}, {inner.num_parameters() / 1e6:,.1f} M parameters, {_kind(inner)}",
        config=config,
        linears=linears,
        attention=attention,
        form=form,
        inner=generator,
        fused=with_given(config, fused if stock_cache else with_pages(inner, config, fused, form), generator),
        stock_attention=stock_attention,
        stock_parts={} if stock_attention else stock_parts(inner),
        stock_cache=stock_cache,
        stock_loop=stock_loop,
        lines=(),
        bytes_before=before,
        bytes_after=before + sum(p.bytes_held for p in linears),
        bandwidth=bandwidth,
        seconds_before=read_before / bandwidth,
        seconds_after=read_after / bandwidth,
        split=split,
        context=context,
        on_disk=(find_originals or find_on_disk)(inner, linears) if config.keep_original == "auto" else None,
    )
    if config.deterministic and plan.variant:
        raise UnsupportedError(f"deterministic=True cannot be met: {'; '.join(plan.variant)}; leave it out")
    return replace(plan, lines=tuple(explain(plan)))


def _checked_split(model: PreTrainedModel, config: PatchConfig) -> TensorParallel | None:
    split = split_of(model)
    if split is not None:
        check_split(split, model, config)
    return split


def _check_weights(model: PreTrainedModel, config: PatchConfig) -> None:
    """Raise UnsupportedError unless the model's weights can be replaced as the config says."""
    check_other_quantizer(model, config)
    check_calibration(config.weights)
    check_in_memory(model, config.weights)
    if config.weights is not None and config.weights.is_nf4:
        check_takes_nf4(model)


def _kind(model: PreTrainedModel) -> str:
    return f"{str(model.dtype).removeprefix('torch.')} on {model_device(model).type}"


def _refusal(keyword: str, config: PatchConfig, refusal: str | None, *, wanted: bool) -> str | None:
    """Return why a part stays stock; raises if the user asked for that part by name."""
    if not wanted:
        return f"{keyword}=None"
    asked = getattr(config, keyword)
    if refusal is not None and keyword in config.explicit and asked != "auto":
        raise UnsupportedError(
            f"{keyword}= was asked for, but {refusal}; leave {keyword}= out, or pass {keyword}=None"
        )
    return refusal


def _stock_cache(model: PreTrainedModel, config: PatchConfig, generator: InnerGenerator | None) -> str | None:
    refusal = no_pages(model, config)
    of_part = generator is not None and generator.stock_cache is None  # whose pages are all that generate() reads
    return refusal if of_part else _refusal("cache", config, refusal, wanted=config.cache is not None)


def _stock_loop(model: PreTrainedModel, config: PatchConfig, stock_cache: str | None) -> str | None:
    """Return why generate stays on transformers' loops; raises if speculation was asked for, which they lack."""
    refusal = stock_cache or loop_refusal(model)
    if config.speculative is not None:
        refuse_drafts(model, config.speculative, refusal)
    return refusal


# -- linears -------------------------------------------------------------------------------------------


def plan_linears(
    model: PreTrainedModel,
    config: WeightConfig | None,
    *,
    device_type: str | None = None,
    eight_bits: Collection[str] = (),
    row_invariant: bool = False,
) -> Iterable[WeightPlan]:
    """Decide about each Linear. device_type: where the weights will be, if the model is on meta still.

    row_invariant: whether backends that are row-invariant come before the others. Raises UnsupportedError if
    embedding= was asked for and cannot be met.
    """
    has_tiles = (device_type or model_device(model).type) in triton.DEVICES
    measuring = None if row_invariant or not has_tiles else Measuring()
    if measuring is not None:
        for module in model.modules():
            if isinstance(module, QuantModule):  # of a quantized checkpoint
                measuring.measure(module.chosen, of_experts=isinstance(module, ExpertWeights))
    if config is not None:
        found = weight_plans(
            model, config, device_type=device_type, eight_bits=eight_bits, backends=Backends(row_invariant, measuring)
        )
        if found.embedding_stays is not None and config.embedding != "auto":
            raise UnsupportedError(
                f"embedding={config.embedding!r} is not possible for {type(model).__name__}: {found.embedding_stays}; "
                "leave embedding= out"
            )
        yield from found.weights
    if measuring is not None:
        measuring.finish()


def _bytes_read(model: PreTrainedModel, linears: Iterable[WeightPlan]) -> int:
    """Count the weight bytes that a decode step reads: all but the input embedding, unless it is the head too."""
    embedding = input_embedding(model)
    table = None if embedding is None else embedding._parameters.get("weight")
    head = model.get_output_embeddings()
    # A quantized head would make a float weight if it was asked for one.
    is_head = head is not None and any(parameter is table for parameter in head.parameters())
    skipped = None if is_head else table
    read = parameter_bytes(p for p in model.parameters() if p is not skipped)
    return read + sum(linear.bytes_read for linear in linears)


def find_on_disk(model: PreTrainedModel, linears: Sequence[WeightPlan]) -> dict[str, Stored] | None:
    """Return where the checkpoint has every weight to be replaced, bit for bit; None unless all can be read back."""
    replaced = [p for p in linears if p.replaces]
    sites = [p.site for p in replaced if p.frees and not p.site.embeddings]
    found = checkpoint_files(model.config._name_or_path) if replaced else {}
    if not found:
        return None
    files: dict[str, Stored] = {**found, **stored_experts(model, found)}
    with Workers[bool]() as workers:
        for site in sites:
            if not all(workers.put(partial(readable, site.tensor_name, site.parameter, files))):
                return None
        if not all(workers.finish()):
            return None
    for shared in (p.site for p in replaced if p.site.embeddings):  # maybe stored by the other name: it is kept then
        if not readable(shared.stored_name, shared.parameter, files):
            files.pop(shared.stored_name, None)
    return files


# -- attention -----------------------------------------------------------------------------------------


def _plan_attention(model: PreTrainedModel, config: PatchConfig) -> Iterable[AttentionPlan]:
    quantized_kv = config.cache is not None and config.cache.dtype != "auto"
    sites = attention_sites(model, quantized_kv=quantized_kv)
    if not sites and config.attention not in ("auto", None):
        raise UnsupportedError(
            f"attention={config.attention!r} was asked for, but {type(model).__name__} has no attention that hf_accel "
            "knows; leave attention= out, or pass attention=None"
        )
    for site in sites:
        backend, refusals = attention_backends.choose_backend(
            site.spec, config.attention or "auto", row_invariant=config.deterministic
        )
        reason = "; ".join(f"{name} refused: {why}" for name, why in refusals) or "first choice"
        yield AttentionPlan(site, backend, reason)


# -- fused ---------------------------------------------------------------------------------------------


def _plan_fused(
    model: PreTrainedModel, config: PatchConfig, linears: Sequence[WeightPlan], *, attention: Iterable[AttentionPlan],
    operators: OperatorModel | None, states: Mapping[nn.Module, Recorded],
) -> FusedPlan:  # fmt: skip
    """Plan the native calls. attention, states: the modules that keep keys and values, or states, in pages, whose
    layers can run as traces. operators: what is known of a model that attends by operators.
    """
    if not config.fuse:
        return FusedPlan(reason="fuse=False")
    device_type = model_device(model).type
    reason = refuses_operators(device_type)
    if reason is not None or model.dtype not in FLOATS:
        return FusedPlan(reason=reason or f"the native calls do not compute in {str(model.dtype)[6:]}")
    has_kernels = has_library(device_type)  # next to a GPU they need not have been built
    float_rows = rows_by_inputs = UNLIMITED if config.deterministic else 0
    if has_kernels and not config.deterministic:
        float_rows = rows_here(model.dtype, measure=config.weights is None)
        if any(map(is_plain_conv1d, model.modules())):
            rows_by_inputs = rows_here(model.dtype, by_inputs=True, measure=config.weights is None)
    candidates, dropped = fused_sites(
        model, model.dtype, float_rows, all_rows=config.deterministic, device_type=device_type
    )
    split = split_of(model)
    if not has_kernels:
        keepers = Keepers({} if split is not None else {p.site.module: p.site.spec for p in attention})
        layers, by_module = layer_sites(model, model.dtype, keepers, linears=None, device_type=device_type)
        return FusedPlan((*candidates, *layers), dropped=(*dropped, *by_module))
    planned = {p.site.module: p for p in linears if p.choice is not None}
    floats = [site for site in native_linears(model, float_rows, rows_by_inputs) if site.module not in planned]
    servers = servers_of(model, planned, {site.module for site in floats}, split)
    foreign = {module for module, server in servers.items() if server is Server.FOREIGN}
    kept = [site for site in candidates if not foreign.isdisjoint(site.module.children())]
    dropped += [Dropped(site.name, site.kind, OWN_FORWARD) for site in kept]
    sites = [site for site in candidates if site not in kept and site.module not in planned]
    kernels = {module for module, server in servers.items() if server is Server.KERNELS}
    specs = {p.site.module: p.site.spec for p in attention if isinstance(p.backend, CpuBackend)}
    # No layer's call lets a prompt see all of itself.
    others = operators is not None and operators.call.whole_prompts
    is_traced = model.config.is_encoder_decoder or not others
    by_operators = operator_sites(model, operators if is_traced else None, config)
    tried = {site.module: site.state for site in by_operators if isinstance(site.state.backend, CpuBackend)}
    specs |= {module: known.spec for module, known in tried.items()}
    layers, by_module = layer_sites(model, model.dtype, Keepers(specs, tried, states), linears=kernels)
    takes_ours = config.attention in ("auto", CpuBackend.name) and split is None
    ours = None if not takes_ours else [] if model_attention_refusal(model) else attention_modules(model)
    if not attends_in_decoder_alone(model, [p.site for p in attention]):
        encoders, stock_encoders = encoder_sites(model, model.dtype, ours=ours, linears=kernels)
        layers, by_module = [*layers, *encoders], [*by_module, *stock_encoders]
    native = [site.name for site in layers]  # each was tried as a layer of both kinds, and its parts too
    by_module = [each for each in by_module if not any(is_within(each.name, name) for name in native)]
    floats, tables = with_trained_head(model, floats)
    return FusedPlan((*sites, *tables, *layers), tuple(floats), (*dropped, *by_module))


# -- what only a run of the model can tell -----------------------------------------------------------------


def planned(model: object, config: PatchConfig, *, find_originals: FindOriginals | None = None) -> Plan:
    """Return the `make_plan` of a model; for average_bits and AWQ a copy of the model is run on a few tokens."""
    todo = make_plan(model, config, find_originals=find_originals)
    if config.weights is not None and config.weights.average_bits is not None:
        todo = make_plan(model, config, find_originals=find_originals, eight_bits=eight_bit_names(todo))
    names = [p.site.name for p in todo.quantized if p.config.method == "awq"]
    if not names:
        return todo
    check_takes_ids(todo.model)
    todo = replace(todo, folds=tuple(find_folds(twin(todo.model), names)))
    return replace(todo, lines=tuple(explain(todo)))

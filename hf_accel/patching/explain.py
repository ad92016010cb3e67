"""The choices of a Plan as lines: about what, what was chosen, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..cache.hf import attends_to_sources
from ..distill.model_loss import learns_by_rows
from ..fused.half_buffers import keeps_halves
from ..fused.hf.encoder_sites import LAYER, STACK
from ..fused.hf.sites import JOINED, JOINS
from ..generation import graphs
from ..generation.hf.graphed_runner import OPERATORS_ON_HOST
from ..generation.hf.users_code import code_in_passes
from ..hardware import UNLIMITED
from ..kernels import cpu as cpu_kernels
from ..linear import QuantModule
from ..parallel.tensor import TensorParallel
from ..recognition.known_modules import other_calls
from ..recognition.unchanged import others_code
from ..tensors import model_device
from .originals import whereabouts
from .plan import Plan
from .printed import Line
from .weight_plan import WeightPlan


def explain(plan: Plan) -> Iterator[Line]:
    """Return each choice of a plan, with its reason, as the line that is printed of it."""
    if model_device(plan.model).type == "cpu":
        yield _kernels_line()
    if plan.split is not None:
        yield _split_line(plan.split)
    yield from _attention_lines(plan)
    yield from _weight_lines(plan)
    yield from _fused_lines(plan)
    yield from _cache_lines(plan) if plan.model.can_generate() else _pass_lines(plan)
    if model_device(plan.model).type != "cpu":
        yield _graphs_line(plan)
    if plan.config.fuse and learns_by_rows(plan.model):
        yield Line("training", "loss", "a few rows at a time", _gradient_of_logits(plan))
    yield _undo_line(plan)
    variant = plan.variant
    reason = "; ".join(variant) or "a request's tokens do not depend on other requests"
    yield Line("exactness", "row-invariant", "no" if variant else "yes", reason)
    yield from _size_lines(plan)


def _gradient_of_logits(plan: Plan) -> str:
    if model_device(plan.model).type == "cpu" and cpu_kernels.refusal() is None:
        return "the gradient of the logits takes their place"
    return "one more tensor like the logits, their gradient"


def _kernels_line() -> Line:
    refusal = cpu_kernels.refusal()
    if refusal is not None:
        return Line("cpu kernels", "C++", "not used", refusal.removeprefix("cpu kernels: "))
    threads = cpu_kernels.threads()
    said = [f"{threads} thread{'s' if threads > 1 else ''}", *filter(None, [cpu_kernels.better_level()])]
    return Line("cpu kernels", "C++", cpu_kernels.isa(), "; ".join(said))


def _split_line(split: TensorParallel) -> Line:
    styles = Counter(split.styles.values())
    named = ", ".join(f"{count} {style}" for style, count in sorted(styles.items()))
    return Line("parallel", f"rank {split.ranks.rank} of {split.ranks.size}", "tensor parallel", f"as loaded: {named}")


def _attention_lines(plan: Plan) -> Iterator[Line]:
    if plan.stock_attention:
        yield Line("attention", "all layers", "stock", plan.stock_attention)
        return
    groups = Counter((planned.backend.name, planned.site.spec.window, planned.reason) for planned in plan.attention)
    for (backend, window, reason), count in groups.items():
        kind = "full" if window is None else f"window {window}"
        yield Line("attention", f"{count} layers, {kind}", backend, reason)
    for name, reason in plan.stock_parts.items():
        yield Line("attention", name, "stock", reason)


def _weight_lines(plan: Plan) -> Iterator[Line]:
    held = Counter(map(_held, (m for m in plan.model.modules() if isinstance(m, QuantModule))))
    for (what, choice), count in held.items():
        yield Line("weights", f"{count} {what}", choice, "as stored")
    if plan.config.weights is None:
        rest, why = ("the rest", "they are no quantized layers") if held else ("all", "weights=None: read in place")
        yield Line("weights", rest, "as they are", why)
        return
    groups: dict[tuple[str, str, str], list[WeightPlan]] = {}
    for linear in plan.linears:
        by = "" if linear.choice is None else f" by {linear.choice.backend.name}"
        groups.setdefault((linear.site.kind, f"{linear.label}{by}", linear.reason), []).append(linear)
    for (what, choice, reason), members in groups.items():
        yield Line("weights", f"{len(members)} {what}{_shapes(members)}", choice, reason)
    yield from _fold_lines(plan)
    if not plan.linears:
        yield Line("weights", "none", "as they are", "the model has no Linear modules")


def _held(layer: QuantModule) -> tuple[str, str]:
    """Return what a layer that a checkpoint holds quantized is, and its format with the backend."""
    return layer.plural, f"{layer.layout.grouped_label} by {layer.chosen.backend.name}"


def _fold_lines(plan: Plan) -> Iterator[Line]:
    """Describe where AWQ's scales of the inputs go."""
    names = [p.site.name for p in plan.quantized if p.config.method == "awq"]
    scaled = {name for fold in plan.folds for name in fold.consumers}
    if scaled:
        producers = Counter(fold.producer.rpartition(".")[2] for fold in plan.folds)
        where = ", ".join(f"{count} {name}" for name, count in producers.items())
        yield Line("weights", f"{len(scaled)} linears, awq", "scales and clips", f"scales are folded into {where}")
    if left := [name for name in names if name not in scaled]:
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in left}))
        yield Line("weights", f"{len(left)} linears, awq", "clips only", f"no exact place for scales is known: {ends}")


def _shapes(members: list[WeightPlan]) -> str:
    shapes = {tuple(m.site.weight.shape) for m in members}
    return f" [{'x'.join(map(str, shapes.pop()))}]" if len(shapes) == 1 else ""


def _fused_lines(plan: Plan) -> Iterator[Line]:
    fused = plan.fused
    if fused.reason is not None:
        yield Line("fused", "nothing", "stock", fused.reason)
        return
    for kind, count in Counter(site.kind for site in fused.sites if site.kind.choice).items():
        yield Line("fused", _counted(count, kind.modules), kind.choice, kind.known_by)
    quantized = plan.config.weights is not None and keeps_halves(plan.model.dtype)
    if quantized and any(site.kind == LAYER for site in fused.sites):
        why = "between quantized linears, where tokens see both sides; hidden states stay float32"
        yield Line("fused", "inside layers", "bfloat16", why)
    shared = Counter(site.state.joined for site in fused.sites if site.kind == JOINED)
    for joined, count in shared.items():
        named = "; ".join(what for kind, what in JOINS.items() if kind in joined)
        yield Line("fused", f"{count} decoder layers", "one launch for two steps", named)
    for rows, count in Counter(site.state.float_rows for site in fused.linears).items():
        native = "any number of" if rows >= UNLIMITED else f"up to {rows}"
        yield Line("fused", _counted(count, "float linears"), f"native for {native} rows", "weights are read in place")
    for (kind, reason), count in Counter((d.kind, d.reason) for d in fused.dropped).items():
        yield Line("fused", _counted(count, kind.modules), kind.else_choice, reason)


def _counted(count: int, what: str) -> str:
    return f"{count} {what.removesuffix('s') if count == 1 else what}"


def _pass_lines(plan: Plan) -> Iterator[Line]:
    """Describe the passes of a model that generates no text: its layers, and what becomes of padding."""
    fused, reads_tokens = plan.fused, plan.model.main_input_name == "input_ids"
    native = [site for site in fused.sites if site.kind == LAYER]
    named = [dropped for dropped in fused.dropped if dropped.kind == LAYER]
    if not native and not named:
        why = fused.reason or plan.stock_attention or "no list of layers was found that see the tokens on both sides"
        yield Line("passes", "layers", "module by module", why)
    if native:
        others = other_calls(site.module for site in native)
        known = ["a hook in a layer", *others, "or a mask that differs from query to query"]
        why = f"those with gradients, output_attentions, {', '.join(known)}"
        yield Line("passes", "other calls", "module by module", why)
    ahead = [site for site in native if site.state.leaves_padding]
    if ahead and (code := others_code(plan.model.modules())) is not None:
        yield Line("passes", "padding", "computed", f"{code} may read it")
    elif ahead:
        is_whole = any(site.kind == STACK and site.state.leaves_padding for site in fused.sites)
        choice = "left out of a whole pass" if is_whole else "left out of each native layer"
        yield Line("passes", "padding", choice, "zeros stand there; shapes stay")
    elif reads_tokens:
        yield Line("passes", "padding", "computed", "as in transformers, since no native layer leaves it out")
    elif native and plan.model.main_input_name != "pixel_values":
        yield Line("passes", "padding", "computed", "its frames are written out too")
    yield Line("passes", "keys and values", "no pages", f"{type(plan.model).__name__} does not generate text")


def _cache_lines(plan: Plan) -> Iterator[Line]:
    cache = plan.config.cache
    if plan.stock_cache and cache is not None and plan.inner is not None and plan.inner.stock_cache is None:
        yield Line("cache", f"of {plan.inner.name!r}", f"paged, block {cache.block_size}", "the rest has none")
        yield _inner_line(plan)
        return
    if plan.stock_cache or cache is None:
        yield Line("cache", "keys and values", "stock", plan.stock_cache or "cache=None")
        yield Line("generate", "all modes", "stock", "no paged cache")
        return
    dtype = str(plan.model.dtype).removeprefix("torch.") if cache.dtype == "auto" else cache.dtype
    capacity = "grows as needed" if cache.max_tokens is None else f"{cache.max_tokens} tokens"
    shares = cache.prefix_sharing and not attends_to_sources(plan.model.config)
    sharing = "prefixes shared" if shares else "prefixes not shared"
    yield Line("cache", "keys and values", f"paged, block {cache.block_size}, {dtype}", f"{capacity}; {sharing}")
    if plan.context is not None:
        ranks = plan.context.ranks
        held = f"each holds 1/{ranks.size} of the blocks"
        yield Line("parallel", f"rank {ranks.rank} of {ranks.size}", "context parallel", held)
    if plan.inner is not None:
        yield _inner_line(plan)
    if plan.stock_loop is not None and plan.inner is not None:
        yield Line("generate", "init_continuous_batching()", "stock", plan.stock_loop)
        return
    if plan.stock_loop is not None:
        yield Line("generate", "all modes", "stock's loops", f"over the paged cache: {plan.stock_loop}")
        return
    yield Line("generate", "greedy, sampling", "ragged", "no padding; a sequence that has ended costs nothing")
    if attends_to_sources(plan.model.config):
        what = "encoder's output" if plan.model.config.is_encoder_decoder else "images"
        yield Line("generate", what, "computed once", "its keys and values are in pages, without padding")
    yield Line("generate", "beams", "ragged", "pages shared until they differ; a prompt that has ended costs nothing")
    if (code := code_in_passes(plan.model)) is not None:
        yield Line("generate", "rows, padding, beams", "stock's loops", f"{code} may read rows and columns")
    yield Line("generate", "init_continuous_batching()", "ragged", "by the loop that an Engine runs")
    yield _speculation_line(plan)


def _inner_line(plan: Plan) -> Line:
    """Return how generate() runs where the model's own one calls that of a part of it."""
    calls, refusal = f"it calls that of {plan.inner.name!r}", plan.inner.stock_loop
    if refusal is None:
        return Line("generate", "generate()", "ragged", calls)
    return Line("generate", "generate()", "stock's loops", f"{calls}: {refusal}")


def _speculation_line(plan: Plan) -> Line:
    config = plan.config.speculative
    if config is None:
        return Line("generate", "speculation", "off", "unless a call asks for it")
    names = ", ".join(drafter if isinstance(drafter, str) else type(drafter).__name__ for drafter in config.drafters)
    length = f"up to {config.max_draft} tokens" if config.num_draft == "auto" else f"{config.num_draft} tokens"
    return Line("generate", "speculation", names, f"{length} a pass, verified by {config.verify}")


def _undo_line(plan: Plan) -> Line:
    kept = plan.config.keep_original
    if not plan.quantized:
        return Line("undo", "unpatch()", "exact", "no weight is replaced")
    in_memory = [p for p in plan.quantized if not p.site.is_offloaded]
    if in_memory and kept is False:
        return Line("undo", "unpatch()", "impossible", "keep_original=False drops the original weights")
    size = sum(p.site.weight.nbytes for p in plan.quantized if p.frees)
    stay = whereabouts(size, plan.on_disk, kept=kept is True) if in_memory else "stay where accelerate offloads them"
    return Line("undo", "unpatch()", "exact", f"originals {stay}")


def _graphs_line(plan: Plan) -> Line:
    """Return whether passes of the ragged loop can be replayed as graphs; other obstacles are in stats()."""
    host = sorted({p.backend.name for p in plan.attention if not p.backend.capturable})
    refusal = (
        graphs.refusal(model_device(plan.model))
        or plan.stock_loop
        or (graphs.SPLIT if plan.agreement.size > 1 else None)
    )
    if refusal is None and plan.form.operators is not None:
        refusal = OPERATORS_ON_HOST
    if refusal is None and host:
        refusal = f"the attention backend {host[0]!r} reads the lengths of sequences on the host"
    if refusal is not None:
        return Line("graphs", "decode, verification", "none", refusal)
    reason = "captured when a shape of a pass is first met; stats() counts the passes without one"
    return Line("graphs", "decode, verification", "CUDA graphs", reason)


def _size_lines(plan: Plan) -> Iterator[Line]:
    before, after = plan.bytes_before / 1e6, plan.bytes_after / 1e6
    yield Line(
        "bytes", "weights", f"{before:,.1f} -> {after:,.1f} MB", "while patched; originals that are kept come on top"
    )
    what, unit = ("decode, batch 1", "ms a token") if plan.model.can_generate() else ("a pass, few tokens", "ms")
    yield Line(
        "speed",
        what,
        f"{plan.seconds_before * 1e3:,.2f} -> {plan.seconds_after * 1e3:,.2f} {unit}",
        f"at least, since memory is read at {plan.bandwidth / 1e9:,.0f} GB/s here",
    )

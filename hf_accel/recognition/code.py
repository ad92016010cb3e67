"""Code that is read: a function's source, patterns in a module's forward, its use of masks, keys, values and caches.

A module is known by its forward and the methods that it calls. Branches for an encoder's output are left out.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CellType, FunctionType
from typing import Any

import torch.nn.functional as F

from .cache_code import (
    CACHE_NAMES,
    POSITION_BIAS,
    assigned_to,
    assignments,
    cache_refusals,
    counts_tokens,
    expansion_of,
    keyword,
    names_in,
    parameters,
    passes_on,
    takes_given_keys,
    updates_of,
)
from .dead_branches import DeadBranches
from .selected_code import SELECTED, selects_tokens
from .source import is_renaming, nodes_of, tree_of, without_renaming


@lru_cache(maxsize=4096)
def siblings(forward: Callable[..., Any]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the submodules that `forward` calls on one variable, in the order of the calls.

    Only calls `self.name(variable)` count, and only variables that are never assigned to after the first of them.
    """
    tree = tree_of(forward)
    if tree is None:
        return ()
    groups: dict[str, list[str]] = {}
    first_line: dict[str, int] = {}
    for node in sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=layer), args=[ast.Name(id=variable)], keywords=[]
            ):
                groups.setdefault(variable, []).append(layer)
                first_line.setdefault(variable, node.lineno)
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    changed = {n.id for n in stored if n.id in groups and n.lineno >= first_line[n.id]}
    return tuple(
        tuple(names)
        for variable, names in groups.items()
        if len(names) > 1 and len(set(names)) == len(names) and variable not in changed
    )


@dataclass(frozen=True)
class GatedCode:
    """The submodules' names in down(act(gate(x)) * up(x)). activation: an attribute's name, or a torch function."""

    gate: str
    up: str
    down: str
    activation: str | Callable[..., Any]


INPUT = "$"  # stands for the input in code that is compared; no variable has such a name
GATED, UP = r"(?P<activation>[\w.]+)\(self\.(?P<gate>\w+)\(\$\)\)", r"self\.(?P<up>\w+)\(\$\)"
MLPS = tuple(rf"self\.(?P<down>\w+)\({product}\)" for product in (rf"{GATED} \* {UP}", rf"{UP} \* {GATED}"))


@lru_cache(maxsize=4096)
def gated_code(forward: Callable[..., Any]) -> GatedCode | None:
    """Return the parts of a forward that is down(act(gate(x)) * up(x)) and nothing else; None for any other."""
    tree = tree_of(forward)
    if tree is None or len(arguments := tree.args.args) != 2 or tree.args.vararg or tree.args.kwonlyargs:
        return None
    result = _result(tree, {arguments[1].arg: ast.Name(INPUT)})
    code = "" if result is None else ast.unparse(result)
    found = next((match for mlp in MLPS if (match := re.fullmatch(mlp, code))), None)
    if found is None:
        return None
    holder, _, name = found["activation"].rpartition(".")
    activation = name if holder == "self" else _torch_function(found["activation"], forward)
    names = {found["gate"], found["up"], found["down"], activation}
    if activation is None or len(names) < 4:
        return None
    return GatedCode(found["gate"], found["up"], found["down"], activation)


def _result(tree: ast.FunctionDef, values: dict[str, ast.expr]) -> ast.expr | None:
    """Return the result of straight-line code, with its variables replaced by their values.

    values: the inputs; assigned variables are added. None where a variable is assigned twice.
    """
    statements = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in values:
                values[name] = _Inline(values).visit(copy.deepcopy(value))
            case ast.Return(value=ast.expr() as value) if statement is statements[-1]:
                result: ast.expr = _Inline(values).visit(copy.deepcopy(value))
                return result
            case _:
                return None
    return None


class _Inline(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)


def _torch_function(name: str, forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function of torch.nn.functional that code names, under any name of the module, such as F.silu."""
    first, *rest = name.split(".")
    found: Any = getattr(without_renaming(forward), "__globals__", {}).get(first)
    for part in rest:
        found = getattr(found, part, None)
    known = callable(found) and getattr(F, getattr(found, "__name__", ""), None) is found
    return found if known else None


ROTATION = "apply_rotary_pos_emb"  # the name under which code finds its rotation
PARTING_ROTATION = f"{ROTATION}_interleave"  # of neighbours, which it leaves apart
ROTATIONS = (ROTATION, PARTING_ROTATION, f"{ROTATION}_vision")  # a trace may follow one of tokens in a row


def with_functions(forward: Any, functions: dict[str, Callable[..., Any]]) -> FunctionType:
    """Copy a forward, so that it finds other functions under these names."""
    if is_renaming(forward):
        own = forward.__wrapped__
        inner = with_functions(own, functions)
        cells = tuple(CellType(inner) if cell.cell_contents is own else cell for cell in forward.__closure__)
        return FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, cells)
    copy = FunctionType(
        forward.__code__, forward.__globals__ | functions, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


# -- attention: is it known to be right for ours? ------------------------------------------------------

# The keywords that our attention function applies, and those that stock's sdpa ignores as well.
CALL_KEYWORDS = frozenset({
    "attention_mask", "dropout", "scaling", "is_causal", "softcap", "s_aux", "sinks", "sliding_window",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "output_attentions",
    "query", "key", "value", "deterministic", "use_cache",
})  # fmt: skip
LIBRARIES = (
    "torch.", "builtins", "transformers.modeling_utils", "transformers.modeling_layers", "transformers.generation.",
    "transformers.integrations.", "transformers.utils.",
)  # fmt: skip


@dataclass(frozen=True)
class AttentionCode:
    """Facts about a kind of module; a refusal is a clause, or None.

    attends: whether it calls an attention function of transformers' interface. refusal: why that function cannot be
    ours. unpaged: why K and V cannot stay in pages on the way to it, or the cache cannot be paged, even if the
    function can be ours. caches: whether it updates a cache. expands: whether it makes K and V by its own `expand_kv`
    of what the cache returns. reuses: whether it can take K and V that another layer gave it. counts: whether it
    counts the tokens of its cache to know their positions. eager: the name, in the class's file, of the attention
    function that it uses if no other is chosen.
    """

    attends: bool = False
    eager: str | None = None
    refusal: str | None = None
    unpaged: str | None = None
    caches: bool = False
    expands: bool = False
    reuses: bool = False
    counts: bool = False


def code_of(module: Any) -> AttentionCode:
    """Return the facts about a module; branches that need a part which it does not have are left out."""
    return attention_code(type(module), absent_parts(module))  # type: ignore[arg-type]


def absent_parts(module: Any) -> frozenset[str]:
    """Return the names of a module's parts and attributes that are None."""
    own = vars(module)
    places = (own, own["_modules"], own["_parameters"], own["_buffers"])
    return frozenset([name for place in places for name, value in place.items() if value is None])


@lru_cache(maxsize=4096)
def attention_code(kind: type, absent: frozenset[str] = frozenset()) -> AttentionCode:
    """Return the facts about modules of a class whose attributes named in `absent` are None."""
    name = kind.__name__
    functions = functions_of(kind, absent)
    if functions is None:
        reason = f"the source of {name} cannot be read"
        return AttentionCode(refusal=reason, unpaged=reason)
    calls = {id(function): _interface_calls(function) for function in functions}
    attends = any(calls.values())
    refusals: list[str] = []
    unpaged: list[str] = []
    forward: Any = kind.forward  # type: ignore[attr-defined]
    given = {keyword.arg for each in calls.values() for call in each for keyword in call.keywords}
    known = CALL_KEYWORDS | ({SELECTED} if SELECTED in given and selects_tokens(forward) else set())
    for function in functions:
        found = (clause for call in calls[id(function)] for clause in _call_refusals(function, call, known))
        refusals += [f"{name} {clause}" for clause in found]
        unpaged += [f"{name} {clause}" for clause in cache_refusals(function, calls[id(function)])]
    if not attends and _computes_attention(name, functions):
        refusals.append(f"{name} {BY_ITSELF}")
    return AttentionCode(
        attends=attends,
        eager=next((eager for function in functions for eager in _eager_names(function)), None),
        refusal=min(refusals, key=lambda refusal: POSITION_BIAS in refusal, default=None),
        unpaged=next(iter(unpaged), None),
        caches=any(updates_of(function) for function in functions),
        expands=any(expansion_of(each, call) is not None for each in functions for call in calls[id(each)]),
        counts=any(counts_tokens(function) is True and calls[id(function)] for function in functions),
        reuses=any(takes_given_keys(each, call) for each in functions for call in calls[id(each)]),
    )


# -- which code --------------------------------------------------------------------------------------------


def functions_of(kind: type, absent: frozenset[str]) -> list[ast.FunctionDef] | None:
    """Return forward, and the class's own methods that it calls; None if one that could matter cannot be read."""
    found: dict[str, ast.FunctionDef] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        function = _own_method(kind, name)
        if name in found or function is None:
            continue
        node = tree_of(function)
        if node is None:
            if any("mask" in n or n in CACHE_NAMES for n in without_renaming(function).__code__.co_varnames):
                return None
            continue
        found[name] = DeadBranches(absent).visit(node)
        for part in nodes_of(found[name]):
            match part:
                case ast.Attribute(value=ast.Name(id="self"), attr=own):
                    waiting.append(own)
    return list(found.values())


def _own_method(kind: type, name: str) -> FunctionType | None:
    """Return the method that the class finds, unless a library defines it for all modules."""
    for base in kind.__mro__:
        if name in vars(base):
            method = vars(base)[name]
            known = base.__module__.startswith(LIBRARIES) or not isinstance(method, FunctionType)
            return None if known else method
    return None


# -- calls of the attention function -----------------------------------------------------------------------


def _interface_calls(function: ast.FunctionDef) -> list[ast.Call]:
    """Return the calls of functions that were taken from ALL_ATTENTION_FUNCTIONS."""
    names = {
        target.id
        for value, target in assignments(function)
        if "ALL_ATTENTION_FUNCTIONS" in names_in(value) and isinstance(target, ast.Name)
    }
    return [
        node
        for node in nodes_of(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]


def _eager_names(function: ast.FunctionDef) -> Iterator[str]:
    """Return the second argument of ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)."""
    for node in nodes_of(function):
        match node:
            case ast.Call(func=ast.Attribute(attr="get_interface"), args=[_, ast.Name(id=name)]):
                yield name


def _call_refusals(function: ast.FunctionDef, call: ast.Call, known: frozenset[str]) -> Iterator[str]:
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    unknown = sorted(n for n, value in named.items() if n not in known and not _is_none(function, value))
    if unknown:
        yield f"passes {min(unknown, key=lambda name: name == POSITION_BIAS)}= to its attention function"
    if len(call.args) > 5 or any(isinstance(argument, ast.Starred) for argument in call.args):
        yield "calls its attention function in a way of its own"
    mask = call.args[4] if len(call.args) > 4 else keyword(call, "attention_mask")
    if mask is not None and not passes_on(function, mask):
        yield "changes the mask on the way to its attention function"
    causal = named.get("is_causal")
    meant = [value for value, target in assignments(function) if getattr(target, "id", 0) == getattr(causal, "id", 1)]
    if causal is not None and any("attention_mask" in names_in(value) for value in (causal, *meant)):
        yield "is causal only where it is given no mask"  # ours always gives one


def _is_none(function: ast.FunctionDef, value: ast.expr) -> bool:
    """Return whether an argument is always None."""
    if not isinstance(value, ast.Name):
        return isinstance(value, ast.Constant) and value.value is None
    values = assigned_to(function, value.id)
    constants = all(isinstance(v, ast.Constant) and v.value is None for v in values)
    return bool(values) and constants and value.id not in parameters(function)


# -- attention without the interface -----------------------------------------------------------------------

BY_ITSELF = "computes attention by itself"
OPERATORS = ("softmax", "Softmax", "scaled_dot_product_attention")


def _computes_attention(name: str, functions: list[ast.FunctionDef]) -> bool:
    """Return whether a module applies a mask that it is given to scores of its own."""
    masked = any("mask" in parameter for function in functions for parameter in parameters(function))
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for function in functions
        for node in nodes_of(function)
        if isinstance(node, ast.Call)
    }
    return masked and "ttention" in name and bool(called & set(OPERATORS))

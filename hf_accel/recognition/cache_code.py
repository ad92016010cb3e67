"""Code that is read: what a function does with a cache, and with K, V and its mask on the way to its attention
function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from .source import nodes_of

EXPANDS = "expand_kv"  # the method that makes keys and values of compressed ones
POSITION_BIAS = "position_bias"  # the keyword of a bias that is added to scores
CACHE_NAMES = frozenset({"past_key_values", "past_key_value", "layer_past", "cache_params", "cache"})
COUNT = "get_seq_length"
CACHE_METHODS = frozenset({"update", COUNT, "get_query_offset", "get_mask_sizes", "is_initialized"})
MORE_THAN_ONCE = "updates the cache, or attends, more than once"
CHANGES_KEYS = "changes K or V between the cache and its attention function"
# What the cache of an encoder-decoder has alone. A trial shows what its decoder does with them.
PARTS_OF_TWO = frozenset({"self_attention_cache", "cross_attention_cache", "is_updated"})


@lru_cache(maxsize=64)  # as nodes_of
def assignments(function: ast.FunctionDef) -> tuple[tuple[ast.expr | None, ast.expr], ...]:
    """Return (value, target) of each assignment."""
    return tuple(_assignments(function))


def _assignments(function: ast.FunctionDef) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    for node in nodes_of(function):
        if isinstance(node, ast.Assign):
            yield from ((node.value, target) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            yield node.value, node.target


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def parameters(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    return {argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}


def names_in(node: ast.AST | None) -> set[str]:
    return set() if node is None else {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def cache_refusals(function: ast.FunctionDef, calls: list[ast.Call]) -> Iterator[str]:
    """Yield why K and V cannot stay in pages on the way to an attention function, each as a clause."""
    caches, updates = _caches(function), updates_of(function)
    for node in nodes_of(function):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in caches:
            if node.attr not in CACHE_METHODS | PARTS_OF_TWO:
                yield f"uses {ast.unparse(node)}"
        elif isinstance(node, ast.Subscript) and getattr(node.value, "id", None) in caches:
            yield f"reads {ast.unparse(node)}"
    if not updates:
        return
    biased = any(keyword(call, POSITION_BIAS) is not None for call in calls)  # by what it counts, see bias.py
    if calls and not biased and counts_tokens(function) is False:
        yield "counts the tokens of its cache in a way of its own"
    if len(updates) > 1 or len(calls) != 1:
        yield MORE_THAN_ONCE
    elif not _hands_on(function, updates[0], calls[0]):
        yield CHANGES_KEYS


def counts_tokens(function: ast.FunctionDef) -> bool | None:
    """Return whether a function adds `cache.get_seq_length()` to the numbers of its tokens, 0, 1, .., and uses it for
    nothing else; None if it does not ask for it."""
    caches = _caches(function)
    asked = [
        node
        for node in nodes_of(function)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in caches and node.attr == COUNT
    ]
    if not asked:
        return None
    made = [
        (value, target) for value, target in assignments(function) if value is not None and asked[0] in ast.walk(value)
    ]
    match made:
        case [
            (
                ast.Call(func=call) | ast.IfExp(body=ast.Call(func=call), orelse=ast.Constant(value=0)),
                ast.Name(id=name),
            )
        ]:
            numbered = f"torch.arange(hidden_states.shape[1], device=hidden_states.device) + {name}"
            sums = [
                node for node in nodes_of(function) if isinstance(node, ast.BinOp) and ast.unparse(node) == numbered
            ]
            uses = [node for node in nodes_of(function) if isinstance(node, ast.Name) and node.id == name]
            return call is asked[0] and len(asked) == len(sums) == 1 and len(uses) == 2
    return False


def updates_of(function: ast.FunctionDef) -> list[ast.Attribute]:
    """Return where a function updates the cache."""
    caches = _caches(function)
    return [
        node
        for node in nodes_of(function)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in caches and node.attr == "update"
    ]


def _caches(function: ast.FunctionDef) -> set[str]:
    """Return the names of the cache: parameters, and variables that they are assigned to."""
    names = set(CACHE_NAMES & parameters(function))
    for value, target in assignments(function):
        if isinstance(value, ast.Name) and value.id in names and isinstance(target, ast.Name):
            names.add(target.id)
    return names


def _hands_on(function: ast.FunctionDef, update: ast.Attribute, call: ast.Call) -> bool:
    """Return whether `k, v = cache.update(k, v, layer)` is followed by a call with k and v as they are.

    The call may be one of the module's own expand_kv, whose results are then the k and v of the attention function.
    """
    expansion = expansion_of(function, call)
    keys, values = _keys_and_values(call) if expansion is None else expansion.args
    if expansion is not None:
        uses = [node.id for node in nodes_of(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
                and node.lineno > (update.end_lineno or update.lineno)]  # fmt: skip
        if any(isinstance(each, ast.Name) and uses.count(each.id) != 1 for each in (keys, values)):
            return False
        call = expansion
    if not (isinstance(keys, ast.Name) and isinstance(values, ast.Name)):
        return False
    assigned = [
        (node, target)
        for node in nodes_of(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.func is update
        for target in node.targets
    ]
    if len(assigned) != 1:
        return False
    node, target = assigned[0]
    wanted = isinstance(target, ast.Tuple) and [getattr(e, "id", None) for e in target.elts] == [keys.id, values.id]
    return bool(wanted and not _is_written(function, {keys.id, values.id}, node, call))


def _keys_and_values(call: ast.Call) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the arguments that a call gives as keys and values."""
    keys, values = (call.args[i] if len(call.args) > i else keyword(call, n) for i, n in ((2, "key"), (3, "value")))
    return keys, values


def takes_given_keys(function: ast.FunctionDef, call: ast.Call) -> bool:
    """Return whether a function can take the K and V of its attention call from a parameter, `k, v = given[...]`.

    There another layer has left them.
    """
    wanted = [getattr(each, "id", None) for each in _keys_and_values(call)]
    return any(
        isinstance(value, ast.Subscript)
        and getattr(value.value, "id", None) in parameters(function)
        and isinstance(target, ast.Tuple)
        and [getattr(each, "id", None) for each in target.elts] == wanted
        for value, target in assignments(function)
    )


def expansion_of(function: ast.FunctionDef, call: ast.Call) -> ast.Call | None:
    """Return the call `k, v = self.expand_kv(a, b)` if its results are used once, as K and V of the given call."""
    keys, values = (getattr(each, "id", None) for each in _keys_and_values(call))
    if keys is None or values is None:
        return None
    assigned = [
        (node, target)
        for node in nodes_of(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if {keys, values} & {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    ]
    match assigned:
        case [(ast.Assign(value=ast.Call(args=[_, _], keywords=[]) as made), ast.Tuple(elts=elements))]:
            method = isinstance(made.func, ast.Attribute) and ast.unparse(made.func) == f"self.{EXPANDS}"
            loaded = [n.id for n in nodes_of(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
            once = loaded.count(keys) == loaded.count(values) == 1
            named = [getattr(each, "id", None) for each in elements] == [keys, values]
            return made if method and once and named else None
    return None


def _is_written(function: ast.FunctionDef, names: set[str], after: ast.Assign, before: ast.Call) -> bool:
    return any(
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and node.id in names
        and (after.end_lineno or after.lineno) < node.lineno < before.lineno
        for node in nodes_of(function)
    )


def assigned_to(function: ast.FunctionDef, name: str) -> list[ast.expr | None]:
    """Return the values that are assigned to a variable, alone or with others."""
    return [value for value, target in assignments(function) if name in names_in(target)]


def passes_on(function: ast.FunctionDef, mask: ast.expr) -> bool:
    """Return whether the mask is a given one, or such a one without columns of no key, or does not depend on one."""
    masks = {name for name in parameters(function) if "mask" in name}
    if isinstance(mask, ast.Name):
        values = assigned_to(function, mask.id)
        return all(
            isinstance(value, ast.Name) or _is_cut(value, mask.id) or not (names_in(value) & (masks | {mask.id}))
            for value in values
        )
    return not (names_in(mask) & masks)


def _is_cut(value: ast.expr | None, name: str) -> bool:
    """Return whether a value is `mask[:, :, :, :n]` of the variable: a CausalMask that keeps all columns is itself."""
    match value:
        case ast.Subscript(
            value=ast.Name(id=found), slice=ast.Tuple(elts=[*others, ast.Slice(lower=None, step=None)])
        ):
            return found == name and len(others) == 3 and all(ast.unparse(each) == ":" for each in others)
    return False

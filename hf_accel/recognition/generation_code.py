"""Code around generation that is read: what a method of a class's own changes, whether forwards count positions, and
what they do when the model does not train.
"""

from __future__ import annotations

import ast
import copy
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import nn

from .source import source_of, tree_of, without_renaming

# All that a method may name: transformers' own method, and how many logits a pass returns.
HARMLESS_NAMES = frozenset({"super", "prepare_inputs_for_generation", "config", "num_logits_to_keep"})
# All inputs that it may set: how many logits, and no mask behind the first pass.
HARMLESS_INPUTS = frozenset({"logits_to_keep", "attention_mask"})
# All that a method does which also hands on the states of an RWKV model: a pass over pages has them there.
HANDS_ON_STATES = """\
(self, outputs, model_kwargs, is_encoder_decoder, num_new_tokens)
if 'state' in outputs:
    model_kwargs['state'] = outputs.state
return super()._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder, num_new_tokens)"""
COUNTERS = ("arange", "cumsum", "linspace")


def only_passes_on(kind: type, method: str) -> bool:
    """Return whether a class's own `method` calls that of GenerationMixin, and changes nothing that a loop over tokens
    without padding would see.
    """
    owners = [base for base in kind.__mro__ if method in vars(base)]
    if len(owners) != 2 or owners[1].__name__ != "GenerationMixin":
        return False
    function = without_renaming(vars(owners[0])[method])
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    if _lines_of(function) == HANDS_ON_STATES:
        return True
    code = function.__code__
    return (
        set(code.co_names) <= HARMLESS_NAMES
        and method in code.co_names
        and code.co_freevars == ("__class__",)
        and all(_is_harmless(value, code.co_varnames) for value in code.co_consts)
    )


def _lines_of(function: Any) -> str | None:
    """Return the names of the parameters and the statements of a function, without differences of form."""
    tree = tree_of(function)
    names = ", ".join(function.__code__.co_varnames[: function.__code__.co_argcount])
    return None if tree is None else "\n".join([f"({names})", *map(ast.unparse, tree.body)])


def _is_harmless(constant: Any, arguments: tuple[str, ...]) -> bool:
    """Return whether a constant of the code is None, one of HARMLESS_INPUTS, or names of arguments to hand on."""
    if isinstance(constant, tuple):
        return set(constant) <= set(arguments)
    return constant is None or constant in HARMLESS_INPUTS


def hands_on_all(model: Any, method: str) -> bool:
    """Return whether a method that prepares the inputs of a pass hands on all that it is given, as that of a model
    without a cache does: all tokens.
    """
    ids, given = object(), {"attention_mask": object(), "position_ids": object(), "use_cache": object()}
    try:
        found = getattr(model, method)(ids, **given)
    except Exception:  # it looks at what it is given
        return False
    return type(found) is dict and found == given | {"input_ids": ids}


def counts_nothing(model: nn.Module) -> bool:
    """Return whether no forward of a model's modules makes positions of its own, by the functions that it names."""
    sources = [source_of(kind.forward) for kind in {type(module) for module in model.modules()}]
    return all(source is not None and not any(name in source for name in COUNTERS) for source in sources)


@lru_cache(maxsize=4096)
def inference_code(forward: Any) -> str:
    """Return the source of a forward without branches that run in training alone; empty where there is no source."""
    tree = tree_of(forward)
    if tree is None:
        return source_of(forward) or ""
    return ast.unparse(_WithoutTraining().visit(copy.deepcopy(tree)))


def reads_weight_of(forward: Any, name: str) -> bool:
    """Return whether code reads the numbers of the weight of a layer that its module has under a name."""
    return f"self.{name}.weight" in _without_dtypes(forward, name)


def reads_dtype_of(forward: Any, name: str) -> bool:
    """Return whether code reads the dtype of the weight of such a layer, and nothing else of the weight."""
    return f"self.{name}.weight" in inference_code(forward) and not reads_weight_of(forward, name)


def _without_dtypes(forward: Any, name: str) -> str:
    """Return the code without questions about the dtype of a weight, and whether it is a tensor."""
    weight, code = f"self.{name}.weight", inference_code(forward)
    for question in (f"isinstance({weight}, torch.Tensor)", f"{weight}.dtype"):
        code = code.replace(question, "")
    return code


class _WithoutTraining(ast.NodeTransformer):
    """Removes the bodies of `if self.training` and of `if self.training and ...`."""

    def visit_If(self, node: ast.If) -> Any:
        test = node.test
        conditions = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        self.generic_visit(node)
        if any(ast.unparse(condition) == "self.training" for condition in conditions):
            return node.orelse or ast.copy_location(ast.Pass(), node)
        return node

"""The hidden states of a pass, for drafters that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...errors import NotRaggedError, UnsupportedError
from ...fused.state_rows import StateRows
from ...models import layer_lists, layers_config

LAST = (-1,)  # the last hidden states, which a decoder returns
UNNORMED = (-2,)  # those of the last layer, ahead of the last norm


class PassStates:
    """The hidden states of the last pass.

    layers: indices into the hidden states that transformers returns; none are kept without them. rows: of all tokens
    of the pass.
    """

    def __init__(self) -> None:
        self.layers: tuple[int, ...] = ()
        self.rows = StateRows((), 0, 0)
        # A model's parts, layers, and their taps.
        self._known: tuple[Any, tuple[int, ...], list[nn.Module]] = (None, (), [])

    def keep_layers(self, layers: tuple[int, ...], wanted: bool) -> None:
        """Keep the states of these layers from the next pass on, or none."""
        self.layers = layers if wanted else ()

    def taps(self, model: Any, called: Any, arguments: dict[str, Any]) -> list[nn.Module]:
        """Return the modules of which a pass has to keep the outputs.

        called: what the pass calls, the model or a copy of it. arguments: of the call, to which one is added where
        hooks of transformers have to keep the states, as those of a copy; each layer then runs module by module.
        """
        if not self.layers:
            return []
        if called is model:
            parts = tuple(model._modules.values())  # get_decoder() takes long
            if self._known[0] != parts or self._known[1] != self.layers:
                self._known = parts, self.layers, self._taps(model)
            if self._known[2]:
                return self._known[2]
        arguments["output_hidden_states"] = list(self.layers)
        return []

    def _taps(self, model: Any) -> list[nn.Module]:
        try:
            return tapped(model, self.layers)
        except UnsupportedError:
            return []  # transformers knows where its states are

    def keep(self, output: Any, found: Sequence[Tensor]) -> None:
        """Keep the states that the taps of a pass have found, or that it has returned.

        Raises NotRaggedError if it returned none.
        """
        states = getattr(output, "hidden_states", None) or ()
        if not found:
            if len(states) <= max(self.layers) or any(states[layer] is None for layer in self.layers):
                raise NotRaggedError(f"its passes return no hidden states of layers {list(self.layers)}")
            found = [states[layer] for layer in self.layers]
        self.rows = StateRows(tuple(found), 0, found[0].shape[1])


def tapped(model: Any, layers: Sequence[int]) -> list[nn.Module]:
    """Return the modules of a model whose outputs are the hidden states with these numbers.

    Raises UnsupportedError for numbers that the model does not have.
    """
    decoder = model.get_decoder()
    count = layers_config(model.config).num_hidden_layers
    if tuple(layers) == LAST:
        return [decoder]
    listed = next(iter(layer_lists(decoder, count).values()), None)
    if listed is None:
        raise UnsupportedError(f"{type(model).__name__} has no list of {count} layers whose states could be read")
    if tuple(layers) == UNNORMED:
        return [listed[-1]]
    if not layers or not all(1 <= number <= count for number in layers):
        raise UnsupportedError(f"target_layers={list(layers)}: the model has states 1 to {count}")
    return [decoder if number == count else listed[number - 1] for number in layers]


@contextmanager
def read_outputs(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Give a list that has what each of these modules returned when the block has ended: [B, T, C], in their order.

    The hooks are there within the block alone and change nothing, so a pass that is known stays known. Raises
    NotRaggedError for a module that was not called.
    """
    found, outputs = dict[int, Tensor](), list[Tensor]()

    def reader(place: int) -> Callable[..., None]:
        def read(module: nn.Module, args: Any, output: Any) -> None:
            found[place] = output if isinstance(output, Tensor) else output[0]

        return read

    keys = [object() for _ in modules]
    for place, (module, key) in enumerate(zip(modules, keys, strict=True)):
        module._forward_hooks[key] = reader(place)  # type: ignore[index]  # register_forward_hook() takes far longer
    try:
        yield outputs
    finally:
        for module, key in zip(modules, keys, strict=True):
            module._forward_hooks.pop(key, None)  # type: ignore[call-overload]
    if len(found) < len(modules):
        raise NotRaggedError("a layer whose hidden states a drafter reads was not called")
    outputs += [found[place] for place in range(len(modules))]

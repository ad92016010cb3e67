"""weights_changed(): a program says that it has written to the weights of a patched model."""

from __future__ import annotations

from torch import nn

from ...errors import UnsupportedError
from ...undo.state import PART_OF, find_state


def weights_changed(model: nn.Module) -> None:
    """Forget what was computed with the weights that the model had before.

        with torch.no_grad():
            model.get_input_embeddings().weight.data[7] = row
        hf_accel.weights_changed(model)

    From now on no prefix that was cached before is used again, by any Engine, manager or PagedCache, and the drafts of
    "self-int4" are made again. Most changes are seen without this call (docs/serving.md). It is for writes to a few
    rows that torch does not count (through `.data`, numpy or DLPack), and to be certain at once. Requests that run go
    on with the keys and values that they have.

    model: a patched model, or one that holds any number of them, as a PEFT model does; each model that shares the
    weights needs a call of its own. For a model that is not patched there is nothing to do. Any thread may call this.

    Raises UnsupportedError for a part of a patched model.
    """
    outer = vars(model).get(PART_OF)
    if outer is not None:
        raise UnsupportedError(
            f"this {type(model).__name__} is a part of a patched {outer}; call hf_accel.weights_changed() with the "
            f"{outer}"
        )
    for module in model.modules():
        state = find_state(module)
        if state is not None:
            state.generation.forget_weights()

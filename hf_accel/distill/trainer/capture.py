"""The values that are captured in a model's forward pass, and the projections to its teacher's width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...errors import UnsupportedError
from ...hardware.atomic import replaced_file
from ...models import layer_lists, unwrapped

RELATIONS = ("query", "key", "value")
SEPARATE = (("self_attn", "q_proj", "k_proj", "v_proj"), ("attention.self", "query", "key", "value"))
FILE = "distillation_projections.safetensors"


@dataclass(frozen=True)
class Site:
    """A module whose output is wanted: of its last dimension, from `start` to `stop`."""

    module: nn.Module
    start: int = 0
    stop: int | None = None


class Capture:
    """The outputs of some modules during one forward pass, by (part, layer). learns: they need gradients.

    Open only while that pass lasts: the second time that a checkpointed layer runs, in the backward pass, is not
    taken for another. The tensors keep their graph.
    """

    def __init__(self, sites: Mapping[tuple[str, int], Site], *, learns: bool) -> None:
        self._sites, self._learns = dict(sites), learns
        self._handles: list[Any] = []
        self._open = False
        self.found: dict[tuple[str, int], Tensor] = {}

    def install(self) -> None:
        for name, site in self._sites.items():
            self._handles.append(site.module.register_forward_hook(self._keeper(name, site)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open = False
        self.found.clear()

    def open(self) -> None:
        self.found.clear()
        self._open = True

    def take(self) -> dict[tuple[str, int], Tensor]:
        """Close, return what was found, and forget it here. Raises UnsupportedError for modules that were not run, or
        that lost their graph."""
        self._open = False
        whose = "student" if self._learns else "teacher"
        found, self.found = self.found, {}
        missing = sorted(f"{part} {layer}" for part, layer in self._sites.keys() - found.keys())
        if missing:
            raise UnsupportedError(
                f"of the {whose} {', '.join(missing)} did not run as modules of their own, so nothing can be learnt "
                f"from them: unpatch the model, or take transfer from fewer layers"
            )
        for name, value in found.items():
            trained = any(parameter.requires_grad for parameter in self._sites[name].module.parameters())
            if self._learns and trained and not value.requires_grad:
                raise UnsupportedError(
                    f"the student's {' '.join(map(str, name))} has no gradient: reentrant checkpointing cuts it "
                    f"off; give gradient_checkpointing_kwargs={{'use_reentrant': False}}"
                )
        return found

    def _keeper(self, name: tuple[str, int], site: Site) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self._open:
                value = output[0] if isinstance(output, tuple) else output
                self.found[name] = value[..., site.start : site.stop]

        return keep


# -- where to look ---------------------------------------------------------------------------------------


def text_config(model: Any) -> Any:
    return unwrapped(model).config.get_text_config()


def layers_of(model: Any, whose: str) -> nn.ModuleList:
    """The stack of layers of a model, adapters or not."""
    inner, count = unwrapped(model), text_config(model).num_hidden_layers
    found = layer_lists(inner, count)
    if len(found) != 1 or inner.config.is_encoder_decoder:
        raise UnsupportedError(
            f"the {whose} {type(inner).__name__} has not one stack of {count} layers but {len(found)}; transfer of "
            f"hidden states and attention is for lone decoders or encoders; set both weights to 0"
        )
    return next(iter(found.values()))


def projections_of(layer: nn.Module, where: str) -> dict[str, Site]:
    """Finds the modules that make the queries, keys and values of a layer. Raises UnsupportedError for a layer of
    another kind."""
    parts = dict(layer.named_modules())
    for attention, *names in SEPARATE:
        if all(f"{attention}.{name}" in parts for name in names):
            return {kind: Site(parts[f"{attention}.{name}"]) for kind, name in zip(RELATIONS, names, strict=True)}
    fused: Any = parts.get("attn.c_attn")
    if fused is not None and hasattr(parts["attn"], "split_size"):  # GPT-2
        size = parts["attn"].split_size
        return {kind: Site(fused, i * int(size), (i + 1) * int(size)) for i, kind in enumerate(RELATIONS)}
    raise UnsupportedError(
        f"attention_weight: the queries, keys and values of {where} ({type(layer).__name__}) are not known to come "
        f"from q_proj, k_proj and v_proj, from query, key and value, or from GPT-2's c_attn; set it to 0"
    )


# -- projections -----------------------------------------------------------------------------------------


class Projections(nn.Module):
    """Learned linear maps to its teacher's width, one for each student layer of `layers`.

    Orthogonal to begin with, drawn from `seed` alone: torch's own generators stay where they are. float32.
    """

    def __init__(self, layers: Iterable[int], student_width: int, teacher_width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterDict()
        for layer in layers:
            weight = torch.empty(teacher_width, student_width, dtype=torch.float32)
            self.weights[str(layer)] = nn.Parameter(nn.init.orthogonal_(weight, generator=generator))

    def project(self, layer: int, hidden: Tensor) -> Tensor:
        """[..., H_s] to float32 [..., H_t]."""
        return nn.functional.linear(hidden.float(), self.weights[str(layer)])


def save_projections(projections: Projections, folder: str) -> None:
    """Written whole or not at all. Raises HfAccelError if it cannot be written."""
    state = {name: value.detach().cpu().contiguous() for name, value in projections.state_dict().items()}
    with replaced_file(Path(folder) / FILE, errors=(SafetensorError,)) as unfinished:
        save_file(state, unfinished)


def load_projections(projections: Projections, folder: str) -> None:
    """Raises UnsupportedError, with nothing changed, where the checkpoint has none or has others."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise UnsupportedError(
            f"{folder} has no {FILE}: it was not made by a training that learned projections; start again, or set "
            f"hidden_weight=0"
        )
    found = load_file(path)
    shapes, wanted = ({name: tuple(x.shape) for name, x in of.items()} for of in (found, projections.state_dict()))
    if shapes != wanted:
        raise UnsupportedError(
            f"{path} holds {shapes}, and this training needs {wanted}: resume with the same teacher and the same "
            f"hidden_layer_map"
        )
    projections.load_state_dict(found)

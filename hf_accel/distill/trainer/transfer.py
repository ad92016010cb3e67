"""Transfer from inside a teacher: what is captured in a model's forward pass, and the projections to its width."""

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
from ..losses.inside import NOWHERE, hidden_loss, relation_heads, relation_loss, uniform_layer_map
from ..losses.positions import IGNORED, learnt
from ..teachers.labels import is_shifted, labels_of
from ..teachers.live import ModelTeacher
from ..teachers.teacher import Teacher
from .settings import DistillationSettings

PROJECTIONS = "_distillation_projections"
RELATIONS = ("query", "key", "value")
SEPARATE = (("self_attn", "q_proj", "k_proj", "v_proj"), ("attention.self", "query", "key", "value"))
FILE = "distillation_projections.safetensors"
# What was captured, by (part, layer).
Found = dict[tuple[str, int], Tensor]


class Transfer:
    """Adds hidden_weight * H + attention_weight * R to the loss of a student in training mode.

    A DistillationHook installs it, and calls `begin` before and `added` after each forward pass. Between `install` and
    `remove` the student has hooks, and where its width is not its teacher's a submodule of learned projections: the
    optimizer, clipping and data parallelism see them as any other parameter, and no state_dict, and so no checkpoint
    of the student, does.
    """

    def __init__(self, teacher: Teacher, settings: DistillationSettings, seed: int) -> None:
        if not isinstance(teacher, ModelTeacher):
            raise UnsupportedError(
                "hidden_weight and attention_weight need a teacher in memory: a cache holds its logits alone; give "
                "the model as teacher_model, or set both to 0"
            )
        self.teacher, self.settings, self.seed = teacher, settings, seed
        self.projections: Projections | None = None
        self.last: dict[str, Tensor] = {}  # losses of the newest micro-batch, without their weights
        self.captures: tuple[Capture, ...] = ()
        self._student: Any = None

    def install(self, student: Any) -> None:
        """Hook into the layers of both. Raises UnsupportedError if layers cannot be identified."""
        self._student = student
        teacher = self.teacher.model
        mine, others = layers_of(student, "student"), layers_of(teacher, "teacher")
        self._maps(len(mine), len(others))
        self.captures = (
            Capture(_sites(student, mine, self.hidden, self.attention), learns=True),
            Capture(_sites(teacher, others, self.hidden.values(), self.attention.values()), learns=False),
        )
        if self.attention:
            self.causal = _is_causal(mine[0], "student")
            if self.causal != _is_causal(others[0], "teacher"):
                raise UnsupportedError("attention_weight: one of student and teacher is causal and the other is not")
        self._project(student)
        for capture in self.captures:
            capture.install()

    def remove(self) -> None:
        for capture in self.captures:
            capture.remove()
        if self._student is not None:
            self._student._modules.pop(PROJECTIONS, None)
            self._student = None

    # -- what is learnt from what ----------------------------------------------------------------------

    def _maps(self, mine: int, others: int) -> None:
        hidden = self.settings.layer_map("hidden_layer_map") or uniform_layer_map(mine, others)
        attention = self.settings.layer_map("attention_layer_map") or {mine: others}
        self.hidden = hidden if self.settings.hidden_weight else {}
        self.attention = attention if self.settings.attention_weight else {}
        for name, chosen in (("hidden_layer_map", self.hidden), ("attention_layer_map", self.attention)):
            if any(left > mine or right > others for left, right in chosen.items()):
                raise UnsupportedError(f"{name}={chosen}: the student has {mine} layers, the teacher {others}")

    def _project(self, student: Any) -> None:
        widths = [text_config(model).hidden_size for model in (student, self.teacher.model)]
        if not self.hidden or widths[0] == widths[1]:
            return
        if self.projections is None:
            device = next(student.parameters()).device
            self.projections = Projections(self.hidden, widths[0], widths[1], self.seed).to(device)
        student.add_module(PROJECTIONS, self.projections)

    # -- one pass --------------------------------------------------------------------------------------

    def begin(self) -> None:
        for capture in self.captures:
            capture.open()

    def added(self, student: Any, inputs: Mapping[str, Any], shift: bool | None, items: Any) -> tuple[Tensor, int]:
        """The sum to add to that of the labels' losses, and how many labels there are, after a student's forward pass.

        inputs: the keywords of that pass. shift: as in DistillationHook. items: what the trainer divides sums by, None
        for how many labels there are; only logs depend on it.
        """
        weights = token_weights(student, inputs, shift)
        if not self.captures[1].found:
            # With alpha=1, or with no label, nobody has asked the teacher yet.
            self.teacher.rows(inputs, torch.zeros_like(labels_of(inputs), dtype=torch.bool), compact=True)
        mine, others = self.captures[0].take(), self.captures[1].take()
        count = max(round(weights.sum().item()), 1)
        items = count if items is None else items
        total = weights.new_zeros(())
        with torch.autocast(weights.device.type, enabled=False):
            if self.hidden:
                value = self._hidden(mine, others, weights)
                self.last["hidden_loss"] = value.detach() / items
                total = total + self.settings.hidden_weight * value
            if self.attention:
                value = self._relations(mine, others, weights, documents_of(inputs, weights))
                self.last["attention_loss"] = value.detach() / items
                total = total + self.settings.attention_weight * value
        return total, count

    def _hidden(self, mine: Found, others: Found, weights: Tensor) -> Tensor:
        """The mean over the layers chosen."""
        total = weights.new_zeros(())
        for left, right in self.hidden.items():
            state = mine["layer", left]
            if self.projections is not None:
                state = self.projections.project(left, state)
            total = total + hidden_loss(state, others["layer", right], weights, self.settings.hidden_loss)
        return total / len(self.hidden)

    def _relations(self, mine: Found, others: Found, weights: Tensor, documents: Tensor) -> Tensor:
        """The sum over Q-Q, K-K and V-V of the mean over the layers chosen."""
        total = weights.new_zeros(())
        for left, right in self.attention.items():
            pairs = [(mine[name, left], others[name, right]) for name in RELATIONS]
            heads = relation_heads((x.shape[-1] for pair in pairs for x in pair), self.settings.relation_heads)
            for s, t in pairs:
                total = total + relation_loss(s, t, weights, documents, heads=heads, causal=self.causal)
        return total / len(self.attention)


def _sites(
    model: Any, layers: nn.ModuleList, hidden: Iterable[int], attention: Iterable[int]
) -> dict[tuple[str, int], Site]:
    sites = {("layer", layer): Site(layers[layer - 1]) for layer in hidden}
    for layer in attention:
        found = projections_of(layers[layer - 1], f"layer {layer} of {type(model).__name__}")
        sites |= {(name, layer): site for name, site in found.items()}
    return sites


def token_weights(student: Any, inputs: Mapping[str, Any], shift: bool | None = None) -> Tensor:
    """The weight of each token, float32 [B, T]: 1 where it has a label, and where a whole row has one, 1 over its
    tokens."""
    ids, labels = inputs.get("input_ids"), labels_of(inputs)
    batch, length = (inputs["inputs_embeds"] if ids is None else ids).shape[:2]
    if labels.shape == (batch, length):
        return learnt(labels, is_shifted(student, inputs, shift))[0].float()
    mask = inputs.get("attention_mask")
    mask = torch.ones(batch, length, device=labels.device) if mask is None else mask.float()
    if labels.dim() == 1:
        mask = mask * (labels != IGNORED)[:, None]
    return mask / mask.sum(-1, keepdim=True).clamp_min(1)


def documents_of(inputs: Mapping[str, Any], weights: Tensor) -> Tensor:
    """The text of a row that a token belongs to, int64 [B, T]; rows packed from several restart their position_ids."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    found = torch.zeros_like(weights, dtype=torch.long)
    if positions is not None:
        found = (positions.expand(weights.shape) == 0).long().cumsum(-1)
    if mask is None:
        return found
    if mask.dim() != 2:
        raise UnsupportedError(f"attention_weight needs an attention_mask of [B, T], not of {tuple(mask.shape)}")
    return found.masked_fill(mask == 0, NOWHERE)


def _is_causal(layer: nn.Module, whose: str) -> bool:
    found = {bool(module.is_causal) for module in layer.modules() if hasattr(module, "is_causal")}
    if len(found) != 1:
        raise UnsupportedError(
            f"attention_weight: the {whose}'s layers do not say whether they are causal; set it to 0"
        )
    return found.pop()


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
        self.found: Found = {}

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

    def take(self) -> Found:
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
    """Find the modules that make the queries, keys and values of a layer. Raises UnsupportedError for a layer of
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


class Unsaved(nn.ParameterDict):
    """Parameters that are trained with a model, and are in no state dict of it."""

    def _save_to_state_dict(self, *given: Any) -> None: ...

    def _load_from_state_dict(self, *given: Any) -> None: ...


class Projections(nn.Module):
    """Learned linear maps to its teacher's width, one for each student layer of `layers`.

    Orthogonal to begin with, drawn from `seed` alone: torch's own generators stay where they are. float32.
    """

    def __init__(self, layers: Iterable[int], student_width: int, teacher_width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = Unsaved()
        for layer in layers:
            weight = torch.empty(teacher_width, student_width, dtype=torch.float32)
            self.weights[str(layer)] = nn.Parameter(nn.init.orthogonal_(weight, generator=generator))

    def project(self, layer: int, hidden: Tensor) -> Tensor:
        """Map [..., H_s] to float32 [..., H_t]."""
        return nn.functional.linear(hidden.float(), self.weights[str(layer)])

    def named(self) -> dict[str, Tensor]:
        """The maps by their names in a file."""
        return {name: weight.detach() for name, weight in self.named_parameters()}


def save_projections(projections: Projections, folder: str) -> None:
    """Write the file whole or not at all. Raises HfAccelError if it cannot be written."""
    state = {name: weight.cpu().contiguous() for name, weight in projections.named().items()}
    with replaced_file(Path(folder) / FILE, errors=(SafetensorError,)) as unfinished:
        save_file(state, unfinished)


def load_projections(projections: Projections, folder: str) -> None:
    """Raise UnsupportedError, with nothing changed, where the checkpoint has none or has others."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise UnsupportedError(
            f"{folder} has no {FILE}: it was not made by a training that learned projections; start again, or set "
            f"hidden_weight=0"
        )
    found = load_file(path)
    shapes, wanted = ({name: tuple(x.shape) for name, x in of.items()} for of in (found, projections.named()))
    if shapes != wanted:
        raise UnsupportedError(
            f"{path} holds {shapes}, and this training needs {wanted}: resume with the same teacher and the same "
            f"hidden_layer_map"
        )
    for name, weight in projections.named().items():
        weight.copy_(found[name])

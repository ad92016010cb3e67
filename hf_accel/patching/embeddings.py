"""The input embedding of a model: which quantized weight it could look its rows up in, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..config import WeightConfig
from ..linear import LinearSpec, choose
from ..linear.embedding import ROW_BACKEND, TABLE
from ..linear.hf import lost_on_saving
from ..recognition.code import source_of
from ..recognition.unchanged import has_own_forward
from ..tensors import is_plain_tensor, is_sharded
from .plan import LinearPlan
from .survey import LinearSite, other_quantizer, weight_is_read, weight_owners

SCALED_LOOK_UP = "return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)"


@dataclass(frozen=True)
class EmbeddingSite(LinearSite):
    """An embedding that shares its weight with nobody. name: of the table that will hold it. module: the embedding."""

    @property
    def embedding(self) -> str:
        """The name of the embedding."""
        return self.name.removesuffix(f".{TABLE}")

    @property
    def kind(self) -> str:
        return "embedding"

    @property
    def is_read_whole(self) -> bool:
        return False

    @property
    def tensor_name(self) -> str:
        return f"{self.embedding}.weight"


@dataclass(frozen=True)
class Table:
    """The weight that an embedding looks its rows up in. embedding: its name. site: the tied head, or its own weight.

    config: None: there is no such weight. refusal: why the embedding stays as it is, as a clause; None if it need not.
    asked: whether the user has named the format, and must hear of a refusal.
    """

    embedding: str
    site: LinearSite | None
    config: WeightConfig | None
    refusal: str | None
    asked: bool

    def serves(self, site: LinearSite) -> bool:
        """Return whether the embedding looks its rows up in the weight of this site."""
        return self.refusal is None and site is self.site

    def own_plan(self, device_type: str | None) -> Iterator[LinearPlan]:
        """Plan a weight of the embedding's own. device_type: where it will be, if the model is on meta still."""
        if isinstance(self.site, EmbeddingSite) and self.config is not None and self.refusal is None:
            spec = LinearSpec.of(self.site.weight, self.config, device_type=device_type)
            yield LinearPlan(self.site, self.config, "rows are looked up", choose(spec, ROW_BACKEND, finds_rows=True))


def find_table(model: PreTrainedModel, config: WeightConfig, sites: Iterable[LinearSite]) -> Table | None:
    """Return what `config` lets the input embedding look its rows up in; None where it leaves it alone.

    sites: those of all linear layers. An embedding is quantized by itself only where that was asked for.
    """
    if config.embedding is None:
        return None
    asked = config.embedding != "auto"
    embedding = _embedding_of(model)
    name = next((name for name, module in model.named_modules() if module is embedding), "")
    weight = embedding._parameters.get("weight") if isinstance(embedding, nn.Embedding) else None
    if not name or weight is None:
        return Table(name, None, None, "it has no embedding with a weight in floating point", asked)
    head = next((site for site in sites if site.is_head and site.module._parameters["weight"] is weight), None)
    if head is None:
        own = EmbeddingSite(f"{name}.{TABLE}", embedding, is_head=False, is_tied=False, skip=None)
        owners, refusal = {embedding}, _own_refusal(model, own, config)
        table: LinearSite = own
    else:
        table, owners, refusal = head, {embedding, head.module}, _head_refusal(model, head, config)
    refusal = refusal or _refusal(model, name, embedding, owners)
    return Table(name, table, config.for_embedding if head is None else config.for_head, refusal, asked)


def embedding_site(model: PreTrainedModel, name: str) -> EmbeddingSite | None:
    """Return the embedding whose quantized weight a checkpoint calls so; None if the model has no such embedding."""
    embedding = _embedding_of(model)
    known = next((own for own, module in model.named_modules() if module is embedding), None)
    if name != f"{known}.{TABLE}" or not isinstance(embedding, nn.Embedding):
        return None
    return EmbeddingSite(name, embedding, is_head=False, is_tied=False, skip=None)


def _embedding_of(model: PreTrainedModel) -> Any:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # a model of several inputs, or of images alone
        return None


def _head_refusal(model: PreTrainedModel, head: LinearSite, config: WeightConfig) -> str | None:
    """Return why an embedding cannot look its rows up in the head, whose weight is its own."""
    if config.head is None or head.skip is not None:
        return f"its head stays as it is: {head.skip or 'head=None'}"
    if config.embedding == "auto" and not (isinstance(model, GenerationMixin) and model.can_generate()):
        return "the model does not generate text"
    wanted = "int8" if config.embedding == "auto" else config.embedding
    return None if config.head == wanted else f"it is the weight of the head, which gets {config.head.upper()}"


def _own_refusal(model: PreTrainedModel, site: EmbeddingSite, config: WeightConfig) -> str | None:
    """Return why an embedding gets no quantized weight of its own."""
    kept = config.for_embedding
    if kept is None:
        return "it shares no weight with a head"
    other = other_quantizer(model)
    if other is not None:
        return f"the model is quantized by {other}"
    weight = site.parameter
    if is_sharded(weight) or not is_plain_tensor(weight) or not weight.dtype.is_floating_point:
        return "its weight is no plain float tensor"
    if lost_on_saving(model)(site.name):
        return "it is renamed or joined with others when it is saved, so that it would not be found again"
    size = kept.layout.group_size
    return (
        f"group_size={size} does not divide its {weight.shape[1]} numbers" if size and weight.shape[1] % size else None
    )


def _refusal(model: PreTrainedModel, name: str, embedding: nn.Embedding, owners: set[nn.Module]) -> str | None:
    """Return why an embedding must stay. Known are those that look up, and those of Gemma, which multiply by a number
    then.
    """
    kind, weight = type(embedding).__name__, embedding.weight
    if set(weight_owners(model)[id(weight)]) != owners:
        return "other modules have its weight too"
    if [module for _, module in model.named_modules(remove_duplicate=False)].count(embedding) > 1:
        return f"{kind} is in the model twice"
    if is_sharded(weight) or hasattr(embedding, "_hf_hook") or has_own_forward(embedding):
        return f"{kind} is moved or split by others"
    if type(embedding) is not nn.Embedding:
        body = [line.strip() for line in (source_of(type(embedding).forward) or "").splitlines()]
        if body[1:] != [SCALED_LOOK_UP] or not isinstance(getattr(embedding, "scalar_embed_scale", None), float):
            return f"the forward of {kind} is not known"
    if embedding.max_norm is not None:
        return f"{kind} has a max_norm, which changes rows that are looked up"
    if embedding.sparse or embedding.scale_grad_by_freq:
        return f"{kind} is set up to be trained, by sparse or scale_grad_by_freq"
    if weight_is_read(model, name):
        return "the module around it reads its weight"
    return None

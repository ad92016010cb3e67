"""Recognition of attention whose scores also have the product of each query with a key of its distance to a token.

The key is that of a table (Shaw et al. 2018, arXiv 1803.02155), or is made of an embedding of the distance, where each
head adds a vector to its queries (Dai et al. 2019, "Transformer-XL", arXiv 1901.02860). The code is tried against the
formula.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..undo.journal import original_class
from .call_form import MASK, TABLES
from .gated_bias import small_linear
from .known_module import PAIRS, KnownModule, PositionRows, Said, note_parts, tried
from .operation import Operation, UntraceableError
from .stand_ins import ATTENTION_KEPT, StandIn, require
from .symbols import BATCH, TOKENS, WEIGHTS_OF_ATTENTION, Opaque, Vector
from .trial import RandomNumbers, Tolerance, agree, unwatched_twin

DISTANCES = "relative_position_embeddings"
HEADS, DIM, EAGER = 2, 8, "eager"  # of a trial
LIMITS = ("left_max_position_embeddings", "right_max_position_embeddings")  # of the distances that have a key
TRIED_SETTINGS: dict[str, Any] = {
    "num_heads": HEADS, "head_size": DIM, "head_dim": DIM, "scaling": DIM**-0.5, "num_key_value_groups": 1,
    LIMITS[0]: 3, LIMITS[1]: 2, "training": False,
}  # fmt: skip
WITHOUT_EFFECT = {"use_cache": True}  # of what a call may also be given


class DistanceAttention(NamedTuple):
    """The names of a module's parts, and of the argument that holds the embeddings of distances.

    biases: what is added to queries for the products with keys of tokens, and for those with keys of distances.
    positions: a linear layer of the embeddings, or the table of keys. pairs: whether a call's mask is that of the
    pairs of tokens; else it hides keys alone.
    """

    projections: tuple[str, str, str]
    out: str
    biases: tuple[str, ...]
    positions: str
    argument: str
    pairs: bool = False

    @property
    def linears(self) -> tuple[str, ...]:
        return (*self.projections, self.out, *([self.positions] if self.biases else []))


SPEECH = ("linear_q", "linear_k", "linear_v"), "linear_out"
DISTANCE_KINDS = (
    DistanceAttention(*SPEECH, ("pos_bias_u", "pos_bias_v"), "linear_pos", DISTANCES),
    DistanceAttention(*SPEECH, (), "distance_embedding", DISTANCES),
    DistanceAttention(("q_proj", "k_proj", "v_proj"), "o_proj", ("bias_u", "bias_v"), "relative_k_proj", TABLES),
)


def distance_attention(module: nn.Module) -> DistanceAttention | None:
    """Return the parts of a module that attends with keys of distances, and no more; None for any other."""
    own = vars(module)
    held = {name for name, part in own["_modules"].items() if not isinstance(part, nn.Dropout)}
    named = (each for each in DISTANCE_KINDS if held == {*each.linears, each.positions})
    parts = next((each for each in named if own["_parameters"].keys() == {*each.biases}), None)
    if parts is None or own["_buffers"] or "scaling" not in own or not hasattr(own.get("config"), "to_dict"):
        return None
    kind = original_class(module)
    key = kind, kind.forward, parts, tuple(name for name in TRIED_SETTINGS if name in own)
    pairs = tried(key, lambda: next((pairs for pairs in (False, True) if _agrees(module, parts, pairs=pairs)), None))
    return None if pairs is None else parts._replace(pairs=pairs)


def _agrees(module: nn.Module, parts: DistanceAttention, *, pairs: bool) -> bool:
    return all(_agrees_for(module, parts, tokens, pairs=pairs) for tokens in (7, 3))


def _agrees_for(module: nn.Module, parts: DistanceAttention, tokens: int, *, pairs: bool) -> bool:
    """Return whether the code computes the formula for so many tokens, with small weights, with a mask and without."""
    kind, numbers, own, width = original_class(module), RandomNumbers(), vars(module), HEADS * DIM
    linears = {name: small_linear(numbers, width, width) for name in parts.linears}
    biases = {name: nn.Parameter(numbers(HEADS, DIM), requires_grad=False) for name in parts.biases}
    table = nn.Embedding(6, DIM, _weight=numbers(6, DIM))
    others = {} if parts.biases else {parts.positions: table}
    twin = unwatched_twin(module, _modules={**linears, **others}, _parameters=biases)
    config = copy.copy(own["config"])
    vars(config).update({ATTENTION_KEPT: EAGER, "num_attention_heads": HEADS})
    vars(twin).update({name: value for name, value in TRIED_SETTINGS.items() if name in own} | {"config": config})
    x, embeddings = numbers(2, tokens, width), numbers(1, 2 * tokens - 1, width).expand(2, -1, -1)
    seen = torch.ones(2, 1, tokens, tokens, dtype=torch.bool)
    seen[1, ..., tokens // 2 :] = False
    if pairs:
        seen = seen & seen.mT
    mask = seen if pairs else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)

    def theirs(mask: Tensor | None) -> tuple[Tensor, Tensor]:
        given = {parts.argument: embeddings if parts.biases else None, MASK: mask, **WITHOUT_EFFECT}
        out: Tensor = kind.forward(twin, x, **given)[0]
        return out[0], out[1, : tokens // 2]

    def ours(seen: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (linears[name](x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for name in parts.projections)
        first, second = (q + biases[name][:, None] for name in parts.biases) if parts.biases else (q, q)
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        if parts.biases:
            keys = linears[parts.positions](embeddings[0]).view(-1, HEADS, DIM)[tokens - 1 - distance]
        else:
            keys = table.weight[(-distance).clamp(-3, 2) + 3][..., None, :].expand(-1, -1, HEADS, -1)
        scores = (first @ k.mT + torch.einsum("bhid,ijhd->bhij", second, keys)) / DIM**0.5
        scores = scores if seen is None else scores.masked_fill(~seen, torch.finfo(torch.float32).min)
        out = linears[parts.out]((F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))
        return out[0], out[1, : tokens // 2]

    near = Tolerance(of_largest=1e-5)
    return all(agree(lambda m=a: theirs(m), lambda s=b: ours(s), near) for a, b in ((None, None), (mask, seen)))  # type: ignore[misc]


def recorded_distances(
    record: Any, known: tuple[nn.Module, DistanceAttention], x: Any = None, attention_mask: Any = None, **given: Any
) -> tuple[StandIn, Opaque]:
    """In place of the weights of its attention stands what no code may read."""
    module, parts = known
    own, held, parameters = vars(module), vars(module)["_modules"], module._parameters
    x = given.pop("hidden_states", x)
    note_parts(record, module)
    record.note(vars(own["config"]), "num_attention_heads", vars(own["config"]).get("num_attention_heads"))
    embeddings = given.pop(parts.argument, None)
    named = type(embeddings) is Opaque and embeddings is record.given.get(parts.argument)
    if (
        any(value for name, value in given.items() if name not in WITHOUT_EFFECT)
        or not (named or not parts.biases)
        or attention_mask not in (None, record.mask)
        or own["training"]
    ):
        raise UntraceableError("it attends in a way of its own")
    require(x, heads=False)
    dim, scale = own["head_size"] if "head_size" in own else own["head_dim"], own["scaling"]
    products: list[StandIn] = [record.linear(held[name], x) for name in parts.projections]
    width, positions = products[0].width, held[parts.positions]
    if any(each.width != width for each in products) or width % dim:
        raise UntraceableError("its keys have fewer heads than its queries")
    heads, queries = width // dim, [products[0], products[0]]
    if parts.biases:
        added = [Vector(parameters, name, parameters[name]) for name in parts.biases]  # type: ignore[arg-type]
        if any(each.parameter.shape != (heads, dim) or each.parameter.dtype is not record.dtype for each in added):
            raise UntraceableError("it adds a parameter of another size or dtype")
        queries = [record.put("affine", [products[0]], width, vector=None, bias=each, dim=width) for each in added]
    record.visit(positions)
    record.note(vars(positions), "max_norm", vars(positions).get("max_norm"))
    if vars(positions).get("max_norm") is not None:
        raise UntraceableError("its keys of distances are scaled when they are read")
    values = {
        "read": read_distances, "heads": heads, "dim": dim, "scale": scale, "argument": parts.argument,
        "limits": [own.get(name) for name in LIMITS], "dtype": record.dtype,
    }  # fmt: skip
    spans = [queries[1].span, products[1].span]
    record.operations.append(Operation("position_scores", spans, [], (positions,), values))
    q, k, v = (each.view(BATCH, TOKENS, heads, dim).transpose(1, 2) for each in (queries[0], *products[1:]))
    values = {"masked": attention_mask is not None, "places": PAIRS if parts.pairs else None}
    attended = record.attend_to_all((q, k, v), scale, (module,), **values)
    return record.linear(held[parts.out], attended.view(BATCH, TOKENS, width)), WEIGHTS_OF_ATTENTION


def read_distances(operation: Operation, layout: Any, said: Said, tensors: Any) -> Any:
    """Embeddings of distances stand in the order from the largest distance to the smallest."""
    (module,), values = operation.modules, operation.values
    tokens, most, dtype = layout.shape[1], layout.ragged.max_q, values["dtype"]
    distances = torch.arange(1 - most, most, device="cpu")
    if isinstance(module, nn.Embedding):
        (left, right), table = values["limits"], module.weight
        if table.dtype is not dtype or not table.is_cpu or table.shape != (left + right + 1, values["dim"]):
            return None
        keys, rows = table.repeat(1, values["heads"]), left - distances.clamp(-right, left)
    else:
        keys, rows = said(values["argument"]), tokens - 1 - distances
        plain = type(keys) is Tensor and keys.is_cpu and keys.dtype is dtype and keys.ndim == 3
        if not plain or len(keys) not in (1, layout.shape[0]) or keys.shape[1] != 2 * tokens - 1:
            return None
        if len(keys) > 1 and keys.stride(0) and not bool((keys == keys[:1]).all()):
            return None
        keys = module(keys[0])
    return tensors._replace(positions=PositionRows(keys.contiguous(), None, rows.int()))


DISTANCE_MODULES = KnownModule(distance_attention, recorded_distances, inputs=(DISTANCES,))

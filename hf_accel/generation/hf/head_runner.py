"""HeadRunner: calls a draft head on the tokens of many sequences, and on the hidden states that each is read with."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...cache.group import PageGroup
from ...cache.step import PassInputs, Step
from ...cache.storage import KVStorage
from ...config import WeightConfig
from ...fused.draft_programme import Choice, DraftProgramme, DraftRows, HeadParts, MadeDrafts
from ...fused.layer_programme import MOST_TOKENS, LayerProgramme
from ...fused.norms import norm_form
from ...fused.projections import ProjectionCall
from ...fused.state_rows import end_to_end
from ...kernels.cpu.library import native, refusal
from ...linear import QuantLinear
from ...linear.methods.rtn import quantize
from ...models import layer_lists, positions_depend_on_length
from ...recognition.operation import UntraceableError
from ...recognition.trial import RandomNumbers, unwatched_twin
from ...tensors import integers
from ...undo.state import FUSED, find_state
from ..speculation.drafters.target_states import Made, ReadRows
from .generation_state import GenerationState
from .head_module import HeadModule
from .model_runner import ModelRunner

HEAD = "head"  # where a GenerationState keeps the native calls of a draft head
LOOK_EVERY = 16  # calls after which to look again whether a head has changed; no draft can be wrong, but all useless
POSITIONS_AT_ONCE = 512  # the positions whose tables are made together
NEAR = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of the largest logit


class HeadRunner(ModelRunner):
    """A ModelRunner for the decoder of a draft head, which is given fused embeddings instead of ids.

    Its own last hidden states are kept, which the head reads for the tokens that it has drafted. Where the layer of
    the head is one native call, a whole draft is one too; see NativeDrafts.
    """

    def __init__(
        self, native_drafts: NativeDrafts, groups: list[PageGroup], groups_of_layer: list[tuple[int, ...]]
    ) -> None:
        super().__init__(native_drafts.decoder, groups, groups_of_layer)
        self.head, self.groups = native_drafts.head, groups
        self.kept.layers = native_drafts.head.own_layers
        self._embeddings: Tensor | None = None
        self._asked = 0  # how often it was asked whether a draft is one call
        self._narrow, self._native = ProjectionCall(MOST_TOKENS), native_drafts

    def over_vocabulary(self, logits: Tensor, size: int) -> Tensor:
        return self.head.over_vocabulary(logits, size)

    def _narrowed(self, states: Tensor) -> Tensor:
        states, layer = self.head.normed(states), self.head.narrow
        call = self._narrow.ready((layer,), states) if type(layer) is nn.Linear and native(states) else None
        narrowed: Tensor = layer(states) if call is None else call(states)
        return narrowed

    def any_states(self) -> Tensor:
        embeddings = self.head.decoder.get_input_embeddings().weight
        return RandomNumbers()(1, self.head.narrow.in_features, dtype=embeddings.dtype)

    def goes_ahead(self, count: int) -> bool:
        self._asked += 1
        return self._native.takes(count, self.groups, look=self._asked % LOOK_EVERY == 1)

    def draft(self, rows: ReadRows, steps: list[int], nodes: list[int], choice: Choice) -> MadeDrafts:
        return self._native.compute(self, rows.drafting(steps, nodes, choice))

    def read(self, rows: ReadRows) -> Made:
        if self.goes_ahead(len(rows.ids)):
            return self._native.made(self._native.compute(self, rows.drafting()))
        tried = self._native.trial(self, rows)
        given = end_to_end(rows.states)
        states = given if rows.is_own else self._narrowed(given)
        self._embeddings = self.head.fused(states, integers(rows.ids))
        keep = rows.ends
        logits = self(rows.ids, rows.positions, rows.step(), keep)
        states = self.kept.rows.tensor()[keep]
        made = Made(logits if self.head.words is None else self.head.words(states), states)
        self._native.compare(tried, made)
        return made

    def first_call(self, positions: Tensor, embeddings: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return what the decoder gives its layer for embeddings [N, H] at these positions: states, and the rest by
        name.

        Raises UntraceableError if it counts positions by itself.
        """
        if self._counts or not self._positions:
            raise UntraceableError("its decoder takes no positions")
        given = self._tokens_at(positions, embeddings)
        hook = self._native.layer.register_forward_pre_hook(_reached, with_kwargs=True)
        try:
            self.model(**given, use_cache=False)
        except _LayerReached as reached:
            return reached.states, reached.others
        finally:
            hook.remove()
        raise UntraceableError("its decoder does not call its layer")

    def _tokens_at(self, positions: Tensor, embeddings: Tensor) -> dict[str, Tensor]:
        self._embeddings = embeddings
        ids, step = torch.zeros_like(positions), cast(Step, None)  # no pass may have run yet, and none is looked at
        return self._tokens(PassInputs(ids, positions, ids, step))

    def _tokens(self, inputs: PassInputs) -> dict[str, Tensor]:
        given = super()._tokens(inputs)
        assert self._embeddings is not None
        del given["input_ids"]
        return given | {"inputs_embeds": self._embeddings[None]}


# -- a draft in one call -------------------------------------------------------------------------------

Tried = tuple[DraftProgramme, Made]


class NativeDrafts:
    """The native calls of a draft head: a DraftProgramme, from when it has given what the head's own modules give.

    It is given up when something has changed that it depends on, and made again.

    head: whose own linear layers may be rounded. decoder: that of the head, patched.
    """

    def __init__(self, head: HeadModule, decoder: Any) -> None:
        self.head, self.decoder = head, decoder
        self.layer = next(iter(layer_lists(decoder.get_decoder(), 1).values()))[0]
        self.programme: DraftProgramme | None = None
        self.refused: LayerProgramme | None = None  # with which there is no programme, or it has failed its trial

    def takes(self, count: int, groups: list[PageGroup], *, look: bool) -> bool:
        """Return whether a call of `count` rows is native now. groups: the pages of the head. look: whether to look at
        all that the call depends on; else only whether it is where it was.
        """
        programme = self.programme
        if programme is None or count > MOST_TOKENS or not native(programme.parts.embeddings):
            return False
        current = programme.is_in_place() if not look else programme.is_current() and programme.layer is self._layer()
        if not current:
            self.programme = None
            return False
        return not look or self._pages(programme.layer, groups) is not None

    def _layer(self) -> LayerProgramme | None:
        """Return the native call of the head's layer, which its first pass by modules makes."""
        made = getattr(vars(self.layer).get(FUSED), "programme", None)
        return made if type(made) is LayerProgramme else None

    def _pages(self, layer: LayerProgramme, groups: list[PageGroup]) -> KVStorage | None:
        """Return the pages of the layer, if it reads and writes them as they are."""
        group, *others = groups
        if others or type(group) is not PageGroup or group.chunk is not None or group.window != layer.attention.window:
            return None
        pages = group.storage(layer.layer_idx, *layer.written)
        return pages if layer.fits(pages) else None

    def trial(self, runner: HeadRunner, rows: ReadRows) -> Tried | None:
        """Return what a call gives that is to be compared with the head's modules, which compute the same next."""
        layer = self._layer()
        if (
            layer is None
            or layer is self.refused
            or len(rows.ids) > MOST_TOKENS
            or not native(rows.states[0].layers[0])
        ):
            return None
        if self._pages(layer, runner.groups) is None:
            return None
        self.refused = layer  # until the modules have given the same
        try:
            programme = DraftProgramme(layer, self._parts(), self._tables(runner, layer, 0))
        except UntraceableError:
            return None
        if not programme.is_current():  # a hook wants to see a module, for as long as it is there
            self.refused = None
            return None
        return programme, self.made(self._computed(runner, programme, rows.drafting()))

    def compare(self, tried: Tried | None, made: Made) -> None:
        """Take a tried programme if it gave what the head's modules have made."""
        if tried is not None and all(map(_is_near, tried[1], made)):
            self.programme, self.refused = tried[0], None

    def made(self, drafted: MadeDrafts) -> Made:
        """Return what the last step of a call has made."""
        assert drafted.out is not None
        size = self.decoder.get_input_embeddings().weight.shape[1]
        return Made(drafted.out[:, size:], drafted.out[:, :size])

    def compute(self, runner: HeadRunner, rows: DraftRows) -> MadeDrafts:
        """Compute a call, which `takes` must hold for."""
        assert self.programme is not None
        return self._computed(runner, self.programme, rows)

    def _computed(self, runner: HeadRunner, programme: DraftProgramme, rows: DraftRows) -> MadeDrafts:
        last = max(each.position + each.rows + each.steps for each in rows.sequences) - 2
        while programme.tables is not None and last >= programme.tables[0].shape[1]:
            more = self._tables(runner, programme.layer, programme.tables[0].shape[1])
            assert more is not None
            cos, sin = (torch.cat(pair, dim=1) for pair in zip(programme.tables, more, strict=True))
            programme.tables = cos, sin
        layer = programme.layer
        return programme(rows, runner.groups[0].storage(layer.layer_idx, *layer.written))

    def _parts(self) -> HeadParts:
        head, decoder = self.head, self.decoder.get_decoder()
        if len(head.norms):
            raise UntraceableError("it has norms for the states of its target")
        embeddings = head.decoder.get_input_embeddings().weight
        norms = [child for child in decoder.children() if norm_form(child, embeddings.dtype) is not None]
        if len(norms) != 1:
            raise UntraceableError("its decoder has not one norm behind its layer")
        words = head.words or self.decoder.get_output_embeddings()
        own = head.narrow, head.token_norm, head.state_norm, head.fuse
        return HeadParts(embeddings, *own, norms[0], words, head.known)

    def _tables(self, runner: HeadRunner, layer: LayerProgramme, first: int) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin, [1, POSITIONS_AT_ONCE, D], of the positions from `first` on, as the decoder gives them
        to its layer; None if it gives none.
        """
        positions = torch.arange(first, first + POSITIONS_AT_ONCE)
        if positions_depend_on_length(self.decoder.config):
            raise UntraceableError("its positions depend on the length of a text")
        embeddings = RandomNumbers()(POSITIONS_AT_ONCE, layer.width, dtype=layer.dtype)
        states, others = runner.first_call(positions, embeddings)
        if not torch.equal(states[0], embeddings):
            raise UntraceableError("its decoder changes embeddings ahead of its layer")
        tables = others.get("position_embeddings")
        if tables is None and layer.table_dtype is None:
            return None
        if type(tables) is not tuple or any(type(each) is not Tensor or each.ndim != 3 for each in tables):
            raise UntraceableError("its layer is given other tables than cos and sin")
        cos, sin = (each.contiguous() for each in tables)
        if len(cos) != 1 or cos.shape != sin.shape or {cos.dtype, sin.dtype} != {layer.table_dtype}:
            raise UntraceableError("its layer is given other tables than cos and sin")
        return cos, sin


def native_drafts(state: GenerationState, head: HeadModule) -> NativeDrafts:
    """Return the native calls of a head, which are kept for later sessions until its weights change.

    The linear layers are rounded as the head's `weights` says.
    """
    weights = None if refusal() is not None else head.weights
    written = weights, [parameter._version for parameter in head.own_parameters().values()]
    kept = state.drafts.get(HEAD)
    if kept is None or kept[0] is not head or kept[1] != written:
        decoder, own = head.decoder, head
        if find_state(decoder) is None:
            assert state.make_draft is not None
            decoder = state.make_draft(decoder, weights)
        if weights is not None:
            layers = {name: layer for name, layer in head.named_children() if isinstance(layer, nn.Linear)}
            own = unwatched_twin(head, _modules={name: _rounded(layer) for name, layer in layers.items()})
        kept = state.drafts[HEAD] = (head, written, NativeDrafts(own, decoder))
    made: NativeDrafts = kept[2]
    return made


def _rounded(layer: nn.Linear) -> QuantLinear:
    weight = quantize(layer.weight, WeightConfig(8))
    return QuantLinear(weight, layer.bias, activations="int8", backend="auto", dtype=layer.weight.dtype).pack()


class _LayerReached(Exception):
    """The layer was called: with these states, and with other arguments by name."""

    def __init__(self, states: Tensor, others: dict[str, Any]) -> None:
        super().__init__("the layer was called")
        self.states, self.others = states, others


def _reached(layer: nn.Module, arguments: tuple[Any, ...], others: dict[str, Any]) -> None:
    raise _LayerReached(arguments[0], others)


def _is_near(made: Tensor, expected: Tensor) -> bool:
    """Return whether numbers are as near to others as ways to round let them be."""
    far = (made.float() - expected.float()).abs().max()
    return bool(far <= NEAR[expected.dtype] * expected.float().abs().max())

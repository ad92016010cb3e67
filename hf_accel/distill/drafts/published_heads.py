"""Reads EAGLE-3 heads as others publish them: SafeAILab's and SpecForge's files, and those of vLLM's speculators."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from ...errors import HfAccelError, UnsupportedError
from ...generation.hf.head_module import HeadForm, HeadModule
from ...models import layers_config
from ...tensors import is_out_of_memory
from ...undo.journal import original_class

CONFIG = "config.json"
SPECULATORS = "speculators_model_type"  # in a config of vLLM's speculators
ONE_LAYER = "midlayer."  # how SafeAILab calls what others call the first of the layers
FIRST_LAYER = "layers.0."
LAYERS = "eagle_aux_hidden_state_layer_ids"
# What the names of a file are in a HeadModule; the layer's own names stay.
NAMES_HERE = {"fc.": "narrow.", "norm.": "decoder.model.norm.", "lm_head.": "decoder.lm_head."}
NAMES_HERE |= {"embed_tokens.": "decoder.model.embed_tokens.", FIRST_LAYER: "decoder.model.layers.0."}
NAMES_HERE |= {"input_norm.": "norms.0.", "fc_norm.": "norms."}
TABLES = ("d2t", "t2d")
# Fields of a config that say how a model is loaded and called, and not what its layer computes.
NOT_OF_LAYER = (
    "architectures", "model_type", "draft_vocab_size", "quantization_config", "auto_map", "dtype", "torch_dtype",
    "_attn_implementation", "attn_implementation", "return_dict", "output_hidden_states", "output_attentions",
)  # fmt: skip
# Those of the verifier, which speculators may have kept for training; and frequencies that follow from a config.
UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq")


class ReadsPairs(nn.Module):
    """The layer of an EAGLE-3 head: attention reads the norms of an embedding and of a state side by side.

    It is given both, [B, T, 2 H], and gives the state of the next token, [B, T, H]. is_residual_normed: whether
    the norm of the state is what the layer adds to, and not the state.
    """

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def become(self, config: Any, *, is_residual_normed: bool) -> None:
        """Make of a decoder layer what reads pairs."""
        self.is_residual_normed = is_residual_normed
        self.hidden_norm = copy.deepcopy(self.input_layernorm)
        for name in ("q_proj", "k_proj", "v_proj"):
            made = getattr(self.self_attn, name)
            has_bias, dtype = made.bias is not None, made.weight.dtype
            wide = nn.Linear(2 * config.hidden_size, made.out_features, bias=has_bias, dtype=dtype)
            setattr(self.self_attn, name, wide)

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        embeddings, states = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        pairs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        attended: Tensor = self.self_attn(hidden_states=pairs, **others)[0]
        added = (normed if self.is_residual_normed else states) + attended
        made: Tensor = added + self.mlp(self.post_attention_layernorm(added))
        return made


# Releases of transformers differ in whether these have types.
_LlamaLayer: Any = LlamaDecoderLayer
_Qwen3Layer: Any = Qwen3DecoderLayer


class LlamaPairLayer(ReadsPairs, _LlamaLayer):
    """A Llama layer that reads pairs."""


class Qwen3PairLayer(ReadsPairs, _Qwen3Layer):
    """A Qwen3 layer that reads pairs: it norms queries and keys."""


PAIR_MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaPairLayer),
    "qwen3": (Qwen3ForCausalLM, Qwen3PairLayer),
}


def is_published(folder: Path) -> bool:
    """Return whether a folder holds an EAGLE-3 head in a layout of others."""
    if not (folder / CONFIG).is_file():
        return False
    config = _config(folder)
    return SPECULATORS in config or "draft_vocab_size" in config


def read_published(kind: type[HeadModule], folder: Path, target: PreTrainedModel) -> Any:
    """Load a head of class `kind` from a folder, for its target.

    Raises UnsupportedError for a head that is of another kind than EAGLE-3, was made for another target, or has
    settings, weights or a list of tokens that cannot be right, and HfAccelError for files that cannot be read.
    """
    described = _described(_config(folder), folder, target)
    weights = _weights(folder)
    known = _known(weights, folder, described)
    form = HeadForm(
        fuses=False,
        reads_normed=described.reads_normed,
        norms=described.norms,
        has_embeddings="embed_tokens.weight" in weights,
        target=original_class(target),
        target_size=layers_config(target.config).hidden_size,
    )
    try:
        decoder = _decoder(described, target, form)
    except Exception as error:  # transformers raises of many kinds for settings that it cannot use
        raise _wrong_settings(folder, error) from error
    head = kind(decoder, described.layers, known, form=form)
    _fill(head, weights, folder)
    return head.eval()


def _config(folder: Path) -> dict[str, Any]:
    """Return what the config of a folder says. Raises HfAccelError for a file that cannot be read."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HfAccelError(f"{folder / CONFIG} cannot be read: {error}; copy it again") from error
    if not isinstance(found, dict):
        raise HfAccelError(f"{folder / CONFIG} holds a {type(found).__name__} and no settings; copy it again")
    return found


def _wrong_settings(folder: Path, error: Exception) -> Exception:
    """Return what to raise for an error of code that was given the settings of a head."""
    if isinstance(error, HfAccelError) or is_out_of_memory(error):
        return error
    return UnsupportedError(f"{folder / CONFIG} describes no layer that can be made: {error!r}; copy the head again")


@dataclass(frozen=True)
class DescribedHead:
    """Holds what a config says of a head. layer: of the model that its layer is of. words: the tokens that it
    drafts.
    """

    layer: Any
    layers: tuple[int, ...]
    words: int
    is_residual_normed: bool
    reads_normed: bool
    norms: Literal["none", "each", "all"]


def _described(config: dict[str, Any], folder: Path, target: PreTrainedModel) -> DescribedHead:
    """Read a config. Raises UnsupportedError where it is not of such a head, or not of this target."""
    theirs = layers_config(target.config)
    layer = config.get("transformer_layer_config", config)
    nested = config.get("eagle_config") or {}
    for name, value in {"transformer_layer_config": layer, "eagle_config": nested}.items():
        if not isinstance(value, dict):
            raise UnsupportedError(f"{folder / CONFIG}: {name} is a {type(value).__name__} and holds no settings")
    if config.get(SPECULATORS, "eagle3") != "eagle3":
        raise UnsupportedError(f"{folder} holds a {config[SPECULATORS]!r} speculator; heads of kind 'eagle3' are read")
    if SPECULATORS in config and "norm_before_residual" not in config:
        raise UnsupportedError(
            f"{folder / CONFIG} does not say norm_before_residual, which vLLM takes for true and speculators for "
            "false; write into it what the head was trained with"
        )
    made_for = config.get("speculators_config", {}).get("verifier", {}).get("architectures") or []
    own = original_class(target).__name__
    sizes = {
        "vocab_size": (layer.get("vocab_size"), theirs.vocab_size),
        "target_hidden_size": (
            config.get("target_hidden_size") or layer.get("hidden_size"), theirs.hidden_size
        ),
    }  # fmt: skip
    for name, (said, wanted) in sizes.items():
        if said != wanted:
            raise UnsupportedError(
                f"{folder} was made for a model with {name}={said}, and {own} has {wanted}; give the head of this one"
            )
    if made_for and own not in made_for:
        raise UnsupportedError(f"{folder} was made for {', '.join(made_for)}, and this is {own}; give its own head")
    kind = layer.get("model_type", "llama")
    if kind not in PAIR_MODELS or layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedError(
            f"{folder} has {layer.get('num_hidden_layers', 1)} layers of model_type {kind!r}; a head is read that has "
            f"one, of {' or '.join(map(repr, PAIR_MODELS))}"
        )
    flags = {**nested, **config}
    norms: Literal["none", "each", "all"] = "each" if flags.get("fc_norm") else "none"
    try:
        layer_config = _layer_config(layer, kind)
    except Exception as error:  # as above
        raise _wrong_settings(folder, error) from error
    return DescribedHead(
        layer_config,
        _layers(config, nested, theirs.num_hidden_layers, folder),
        config.get("draft_vocab_size") or theirs.vocab_size,
        bool(flags.get("norm_before_residual", False)),
        bool(flags.get("norm_output", False)),
        "all" if flags.get("norm_before_fc") else norms,
    )


def _layer_config(layer: dict[str, Any], kind: str) -> Any:
    """Return the config of the model that the layer is of. It attends to all tokens."""
    fields = {name: value for name, value in layer.items() if name not in NOT_OF_LAYER}
    if kind == "llama":  # whose layers have no window, whatever a config says
        fields = {name: value for name, value in fields.items() if name not in ("sliding_window", "layer_types")}
    fields |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "pad_token_id": None}
    return AutoConfig.for_model(kind, **fields)


def _layers(config: dict[str, Any], nested: dict[str, Any], count: int, folder: Path) -> tuple[int, ...]:
    """Return the target's hidden states that a head reads, as `output_hidden_states` numbers them.

    LAYERS at the top, as in speculators and vLLM, counts these. In `eagle_config`, as in SpecForge and SGLang,
    it counts layers, of whose outputs the first is state 1.
    """
    said: Any = config.get(LAYERS) or nested.get(LAYERS) or [2, count // 2, count - 3]
    added = 0 if config.get(LAYERS) or not nested.get(LAYERS) else 1
    known = isinstance(said, list) and all(type(number) is int and 1 <= number + added < count for number in said)
    if not known:
        raise UnsupportedError(
            f"{folder} reads the hidden states {said!r}, and the target has states 1 to {count - 1} between its "
            f"layers; give the head of this model, or write {LAYERS} into its {CONFIG}"
        )
    return tuple(number + added for number in said)


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder by the names that most layouts have."""
    weights: dict[str, Tensor] = {}
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    for path in paths:
        try:
            read = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        except Exception as error:  # of many kinds: of safetensors, of pickle, of the disk
            if is_out_of_memory(error):
                raise
            raise HfAccelError(f"{path} cannot be read: {error}; copy it again") from error
        weights |= read
    if not weights:
        raise UnsupportedError(f"{folder} holds no *.safetensors and no pytorch_model.bin; give the whole head")
    named = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    return {
        FIRST_LAYER + name.removeprefix(ONE_LAYER) if name.startswith(ONE_LAYER) else name: tensor
        for name, tensor in named.items()
        if name not in UNUSED
    }


def _known(weights: dict[str, Tensor], folder: Path, described: DescribedHead) -> list[int] | None:
    """Take the tables of tokens out of the weights. Returns the ids of those that the head drafts; None for all.

    d2t: [words] int64, by how much the id of each is larger than its number. t2d: [V] bool, which tokens these are.
    """
    d2t, t2d = (weights.pop(name, None) for name in TABLES)
    vocabulary = described.layer.vocab_size
    if described.words == vocabulary:
        return None
    if d2t is None or d2t.shape != (described.words,):
        raise UnsupportedError(
            f"{folder} drafts {described.words} tokens, and has no d2t that says which; copy it whole"
        )
    known = (d2t.long() + torch.arange(len(d2t))).tolist()
    rising = all(first < second for first, second in pairwise(known))
    if not rising or known[0] < 0 or known[-1] >= vocabulary:
        raise UnsupportedError(
            f"{folder}: the ids that d2t gives do not rise from 0 to {vocabulary - 1}; it is no d2t"
        )
    if t2d is not None and (t2d.shape != (vocabulary,) or t2d.bool().nonzero().flatten().tolist() != known):
        raise UnsupportedError(f"{folder}: d2t and t2d name different tokens; take both from one head")
    return known


def _decoder(described: DescribedHead, target: PreTrainedModel, form: HeadForm) -> PreTrainedModel:
    """Build the model of one layer, whose weights are whatever was in memory except for the target's embeddings, of
    which it has a copy in floating point where the target's are quantized.
    """
    config, embeddings = described.layer, target.get_input_embeddings()
    theirs: Any = embeddings.weight
    model, layer = PAIR_MODELS[config.model_type]
    with no_init_weights():
        made: Any = model._from_config(config, dtype=theirs.dtype)
        made.model.layers[0] = layer(config, 0).to(theirs.dtype)
    made.model.layers[0].become(config, is_residual_normed=described.is_residual_normed)
    made.lm_head = nn.Linear(config.hidden_size, described.words, bias=False, dtype=theirs.dtype)
    if not form.has_embeddings:
        if theirs.shape != (config.vocab_size, config.hidden_size):
            raise UnsupportedError(
                f"the head has no embeddings of its own, and reads such of {config.hidden_size} numbers for "
                f"{config.vocab_size} tokens, where the target has {list(theirs.shape)}; give a head of this model"
            )
        shared = isinstance(theirs, nn.Parameter)  # else rows are looked up in a quantized table
        made.model.embed_tokens.weight = theirs if shared else nn.Parameter(theirs.clone(), requires_grad=False)
    decoder: PreTrainedModel = made
    return decoder


@torch.no_grad()
def _fill(head: HeadModule, weights: dict[str, Tensor], folder: Path) -> None:
    """Give a head the weights of a file. Raises UnsupportedError unless these are all that it has, and finite."""
    own = head.own_parameters()
    read = {_name(name): tensor for name, tensor in weights.items()}
    odd = sorted(read.keys() ^ own.keys()) or [name for name in own if own[name].shape != read[name].shape]
    if odd:
        raise UnsupportedError(
            f"{folder} is no EAGLE-3 head that its {CONFIG} describes: {odd[0]!r} and {len(odd) - 1} more "
            "weights are missing, unknown or of another shape"
        )
    wrong = [name for name, tensor in weights.items() if not tensor.float().isfinite().all()]
    if wrong:
        raise UnsupportedError(f"{folder}: {wrong[0]!r} holds numbers that are not finite; the head was not trained")
    for name, parameter in own.items():
        parameter.copy_(read[name])


def _name(name: str) -> str:
    start = next((start for start in NAMES_HERE if name.startswith(start)), "")
    return NAMES_HERE[start] + name.removeprefix(start) if start else name

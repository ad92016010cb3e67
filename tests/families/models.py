"""Every model class of some auto mappings, tiny and with random weights that matter."""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from .configs import BEGIN, tiny_config
from .inputs import decoder_prompts, prompts
from .overrides import OF_MODELS
from .variants import Draws, Group, dtype_of, largest_fitting

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "texts": "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_MAPPING_NAMES",
    "sound": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}

IS_DECODER = " (is_decoder)"  # behind the name of a class that is an encoder unless its config says so
# Classes of several mappings are compared with what they take besides words.
MORE_THAN = {"speech": ("causal", "seq2seq"), "vision": ("causal",)}


@dataclass(frozen=True)
class Family:
    """A model class, and the model type whose config builds it."""

    kind: str
    model_type: str
    name: str
    is_decoder: bool = False
    variant: int = 0  # 0: the configuration of configs.py; any other: one that variants.py draws

    def __str__(self) -> str:
        return self.label

    @property
    def label(self) -> str:
        name = f"{self.name}{IS_DECODER}" if self.is_decoder else self.name
        return f"{name} {self.variant}" if self.variant else name


@cache
def families() -> dict[str, Family]:
    """By the name of the class; a class that is an encoder or a decoder stands there twice. All classes are loaded."""
    both = [[f, replace(f, is_decoder=True)] if _is_both(f) else [f] for f in classes().values()]
    return {family.label: family for families in both for family in families}


@cache
def classes() -> dict[str, Family]:
    """By the name of the class; a class of several model types stands there once, with its own."""
    found: dict[str, Family] = {}
    for kind in MAPPINGS:
        for model_type, names in _mapped(kind).items():
            for name in [names] if isinstance(names, str) else names:
                known, this = found.get(name), Family(kind, model_type, name)
                more = known is not None and known.kind in MORE_THAN.get(kind, ())
                if known is None or more or (known.kind == kind and not _own(known) and _own(this)):
                    found[name] = this
    return found


def family(label: str) -> Family:
    """One of families(), without the seconds in which all of them are loaded."""
    name = label.removesuffix(IS_DECODER)
    return replace(classes()[name], is_decoder=name != label)


def _mapped(kind: str) -> dict[str, Any]:
    """Names of classes by model type; of encoders of texts also the models under a head that fills gaps."""
    named: dict[str, Any] = dict(getattr(modeling_auto, MAPPINGS[kind], {}))
    if kind == "speech":  # models whose prompts hold a sound among words stand in other mappings
        others = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        named |= {model_type: name for model_type, name in others.items() if _hears(name)}
    if kind == "texts":
        base = modeling_auto.MODEL_MAPPING_NAMES
        heads = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        seq2seq = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        named = {name: base[name] for name in heads if name in base and name not in seq2seq} | named
    return named


def _is_both(family: Family) -> bool:
    """Whether the class is an encoder unless its config says is_decoder=True."""
    kind = getattr(transformers, family.name).config_class
    return family.kind == "causal" and getattr(kind, "is_decoder", None) is False


def _hears(name: str) -> bool:
    """Whether a model takes a sound, as its class says."""
    return "audio" in getattr(getattr(transformers, name), "input_modalities", ())


def _own(family: Family) -> bool:
    return family.name.lower().startswith(family.model_type.replace("_", "").replace("-", ""))


def select(names: list[str]) -> list[Family]:
    """Families by the name of a class or of a model type."""
    chosen = [f for f in families().values() if f.name in names or f.model_type in names]
    unknown = set(names) - {f.name for f in chosen} - {f.model_type for f in chosen}
    if unknown:
        raise SystemExit(f"no such model: {', '.join(sorted(unknown))}")
    return chosen


def build(family: Family, *, seed: int = 0, gain: float = 1.0) -> PreTrainedModel:
    """In evaluation mode and float32; the same seed and gain give the same weights."""
    return _made(family, _draws(family, _left_out(family)) if family.variant else None, seed=seed, gain=gain)


def drawn(family: Family) -> dict[str, Any]:
    """What a variant changes: values of fields by the name of the config class."""
    draws = _draws(family, _left_out(family))
    _config(family, draws)
    return draws.values


def _draws(family: Family, left_out: frozenset[Group]) -> Draws:
    return Draws(family.variant, left_out)


@cache
def _left_out(family: Family) -> frozenset[Group]:
    """What of the draws of a variant stock cannot be built with, or run."""
    everything = _draws(family, frozenset())
    with contextlib.suppress(Exception):
        _config(family, everything)
    can_run = _runs(_made(family, _draws(family, frozenset(everything.found)), seed=0, gain=1.0))

    def works(left_out: frozenset[Group]) -> bool:
        try:
            model = _made(family, _draws(family, left_out), seed=0, gain=1.0)
        except Exception:
            return False
        return _runs(model) or not can_run

    return largest_fitting(works, everything.found)


@torch.no_grad()
def _runs(model: PreTrainedModel) -> bool:
    """Whether a model answers in numbers, and generates if it is one that does."""
    batch: dict[str, Tensor] = prompts("causal" if model.can_generate() else "encoder")
    try:
        if model.can_generate():
            model.generate(**batch, max_new_tokens=3, do_sample=False)
        more = (
            {"decoder_input_ids": decoder_prompts(len(batch["input_ids"]))} if model.config.is_encoder_decoder else {}
        )
        output = model(**batch, **more)
    except Exception:
        return False
    numbers = output.logits if getattr(output, "logits", None) is not None else output[0]
    shown = numbers[batch["attention_mask"].bool()] if numbers.shape[:2] == batch["input_ids"].shape else numbers
    return bool(shown.isfinite().all())


def _config(family: Family, draws: Draws | None) -> PreTrainedConfig:
    kind: Any = getattr(transformers, family.name)
    given = OF_MODELS.get(family.name, {}) | OF_MODELS.get(replace(family, variant=0).label, {})
    given |= {"is_decoder": True} if family.is_decoder else {}
    config = tiny_config(family.model_type, kind.config_class, draws=draws, **given)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        config._attn_implementation = "eager"  # as newer transformers choose: older sdpa does not cap
    return config


def _made(family: Family, draws: Draws | None, *, seed: int, gain: float) -> PreTrainedModel:
    kind: Any = getattr(transformers, family.name)
    dtype = dtype_of(family.variant) if family.variant else torch.float32
    config = _config(family, draws)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of layers without a weight, as of no shared expert
        torch.manual_seed(seed)
        # Of 16 bits are the parameters alone, as of a model that is loaded.
        model: PreTrainedModel = kind(config) if dtype == torch.float32 else kind._from_config(config, dtype=dtype)
        enliven(model, gain)
    model = (model.float() if dtype == torch.float32 else model).eval()
    if model.can_generate():
        model.generation_config.eos_token_id = None  # texts of one length: nothing ends by chance
        if hasattr(model.generation_config, "max_denoising_steps"):
            model.generation_config.max_denoising_steps = 4
        if model.config.is_encoder_decoder:
            model.generation_config.decoder_start_token_id = BEGIN
    return model


@torch.no_grad()
def enliven(model: nn.Module, gain: float = 1.0) -> None:
    """Weights as they come out of an initialization hardly move the logits: make them large enough to matter.

    What was initialized to all zeros or ones becomes random around that, and matrices get a standard deviation that
    lets a layer answer about as loud as it is asked. Buffers that are saved and all zeros (biases by which experts are
    chosen) become random too. Anything else (decays, steps) stays.
    """
    for parameter in model.parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        if not parameter.isfinite().all():
            parameter.normal_(std=0.1)
        elif parameter.ndim < 2 or parameter.numel() in parameter.shape:
            if parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            _scale(parameter, gain)
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and buffer.numel() and not buffer.any():
            buffer.add_(torch.randn_like(buffer), alpha=0.1)


def _scale(weight: Tensor, gain: float) -> None:
    fan_in = math.prod(weight.shape[1:]) if weight.ndim > 3 else weight.shape[-1]
    target, std = gain / math.sqrt(fan_in), float(weight.std())
    if std == 0:
        weight.add_(torch.randn_like(weight), alpha=target)
    elif std < target and abs(float(weight.mean())) < 3 * std:
        weight.mul_(target / std)

"""The folders that PEFT saves LoRA adapters to: their settings and matrices, and what of them is refused."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import load_state_dict

from ...errors import UnsupportedError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names of tensors
TARGETS, EXCLUDED, TRANSFORMED = "target_modules", "exclude_modules", "layers_to_transform"
TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")
# Fields of a LoraConfig that are honoured, and those that say how an adapter was trained or where it comes from.
HONOURED = {
    "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern", "exclude_modules",
    "layers_to_transform", "layers_pattern",
}  # fmt: skip
OF_TRAINING = {
    "task_type", "inference_mode", "lora_dropout", "base_model_name_or_path", "revision", "auto_mapping",
    "peft_version", "megatron_config", "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying",
    "eva_config", "corda_config", "lora_ga_config", "arrow_config", "loftq_config", "init_lora_weights", "bias",
    "velora_config",
}  # fmt: skip
# Ways to begin that leave the weights of the model as they are. Others train next to weights that they have changed.
BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")


def settings_of(path: Path, where: str) -> dict[str, Any]:
    """Return the settings of a LoRA adapter. Raises UnsupportedError for what is not known."""
    try:
        found = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"{where}: {CONFIG} cannot be read: {error}; give a folder that PEFT has saved"
        ) from error
    refusal = _refusal(found) if isinstance(found, dict) else f"{CONFIG} holds no settings"
    if refusal is not None:
        raise UnsupportedError(f"{where}: {refusal}; merge it into the model (PEFT's merge_and_unload) instead")
    return {"target_modules": None, **found}


def _refusal(found: dict[str, Any]) -> str | None:
    """Return why an adapter with these settings is none of ours, as one clause; None if it is."""
    if found.get("peft_type") != "LORA":
        return f"peft_type {found.get('peft_type')!r} is not 'LORA'"
    others = {name: value for name, value in found.items() if name not in HONOURED | OF_TRAINING and value}
    if others:
        return f"{', '.join(f'{name}={value!r}' for name, value in others.items())} is not known"
    if found.get("bias", "none") != "none":
        return f"bias={found['bias']!r} changes biases of the model"
    beginning = found.get("init_lora_weights")
    if beginning not in BEGINNINGS:
        return f"init_lora_weights={beginning!r} was trained next to other weights than the model's"
    for name in ("r", "lora_alpha"):
        if not isinstance(found.get(name), int | float) or isinstance(found[name], bool) or found[name] <= 0:
            return f"{name}={found.get(name)!r} is no positive number"
    patterns = (found.get("rank_pattern") or {}, found.get("alpha_pattern") or {})
    return None if all(isinstance(each, dict) for each in patterns) else "its patterns are no mappings"


def matrices_in(path: Path, where: str) -> dict[str, Tensor]:
    try:
        return load_state_dict(str(path / WEIGHTS))
    except Exception as error:  # safetensors has an error of its own
        raise UnsupportedError(
            f"{where}: {WEIGHTS} cannot be read: {error}; save the adapter with safe_serialization=True"
        ) from error


def named_layers(tensors: Mapping[str, Tensor], where: str) -> dict[str, dict[str, Tensor]]:
    """Return matrices A and B by the name of their layer. Raises UnsupportedError for tensors of other kinds."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = TENSOR.fullmatch(name.removeprefix(PREFIX))
        if found is None:
            raise UnsupportedError(
                f"{where}: the tensor {name!r} is no matrix A or B of a linear layer (DoRA, modules_to_save and "
                "embeddings are not served by request); merge it into the model (PEFT's merge_and_unload) instead"
            )
        layers.setdefault(found["layer"], {})[found["matrix"]] = tensor
    for layer, matrices in layers.items():
        if len(matrices) != 2:
            raise UnsupportedError(f"{where}: {layer!r} has only matrix {', '.join(matrices)} of A and B")
    return layers


def reason_left_out(layer: str, config: Mapping[str, Any]) -> str | None:
    """Return why PEFT puts no adapter into a layer of this name, as one clause; None if it puts one there."""
    try:
        setting = _setting_against(layer, config)
    except (re.error, TypeError, ValueError) as error:
        return f"the names of layers in {CONFIG} cannot be read ({error})"
    if setting is None:
        return None
    verb = "name" if setting == EXCLUDED else "do not name"
    return f"its {setting} {config[setting]!r} {verb} it, so that PEFT leaves it out"


def _setting_against(layer: str, config: Mapping[str, Any]) -> str | None:
    """Return the setting by which PEFT leaves a layer of this name out."""
    targets, excluded, indices = (config.get(name) for name in (TARGETS, EXCLUDED, TRANSFORMED))
    if excluded and _names(layer, excluded):
        return EXCLUDED
    if targets is None or targets == "all-linear":
        return None
    if not _names(layer, targets):
        return TARGETS
    if isinstance(targets, str) or layer in targets or indices is None or indices == []:
        return None
    patterns = config.get("layers_pattern") or r"[^.]*"
    starts = (rf"(?:^|.*?\.){each}\.(\d+)\." for each in ([patterns] if isinstance(patterns, str) else patterns))
    found = next((match for match in (re.match(start, layer) for start in starts) if match is not None), None)
    chosen = [indices] if isinstance(indices, int) else indices
    return None if found is not None and int(found[1]) in chosen else TRANSFORMED


def _names(layer: str, given: Any) -> bool:
    """Return whether a pattern matches the name of a layer, or one of several names is its end."""
    if isinstance(given, str):
        return re.fullmatch(given, layer) is not None
    return any(layer == each or layer.endswith(f".{each}") for each in given)


def factor_in(layer: str, config: dict[str, Any], rank: int, where: str) -> float:
    """Return the number that an adapter's product is multiplied by in a layer, as PEFT computes it."""
    planned = _of_pattern(layer, config.get("rank_pattern") or {}, config["r"])
    if planned != rank:
        raise UnsupportedError(f"{where}: {layer!r} has rank {rank}, and {CONFIG} says {planned}")
    alpha = _of_pattern(layer, config.get("alpha_pattern") or {}, config["lora_alpha"])
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def _of_pattern(layer: str, patterns: dict[str, Any], usual: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), usual)


def salt_of(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return a digest of all that an adapter is, so that one that is loaded again finds its prefixes."""
    digest = hashlib.blake2b(
        repr(sorted((name, repr(config.get(name))) for name in HONOURED)).encode(), digest_size=16
    )
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()

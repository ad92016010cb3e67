"""The `quantization_config` of compressed-tensors: which scheme each layer is stored in, by its name there.

Source: compressed-tensors, `QuantizationConfig`, whose arguments take no keys but their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...linear.formats import Layout

VERSION = "0.15.0"  # the first compressed-tensors that transformers 5 reads these layouts with
INT, PACKED, FLOAT, MIXED = "int-quantized", "pack-quantized", "float-quantized", "mixed-precision"
# Layers that vLLM and SGLang multiply by at once: what is one tensor there has one scheme.
UNITS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


@dataclass(frozen=True)
class Scheme:
    """The format of a layer's weight. rounds: whether activations go to INT8, or to FP8 with FP8 weights."""

    layout: Layout
    rounds: bool

    @property
    def format(self) -> str:
        if self.layout.format == "fp8":
            return FLOAT
        return INT if self.rounds else PACKED

    @property
    def label(self) -> str:
        """Return it in the words of users: "W4A16 in groups of 128"."""
        layout = self.layout
        groups = "" if layout.group_size is None else f" in groups of {layout.group_size}"
        kind = " in FP8" if layout.format == "fp8" else ""
        lopsided = "" if layout.symmetric else ", asymmetric"
        return f"W{layout.bits}A{8 if self.rounds else 16}{kind}{groups}{lopsided}"

    def to_dict(self, targets: Iterable[str]) -> dict[str, Any]:
        """A member of `config_groups`."""
        layout = self.layout
        kind = "float" if layout.format == "fp8" else "int"
        weights = {
            "num_bits": layout.bits,
            "type": kind,
            "symmetric": layout.symmetric,
            "strategy": "channel" if layout.group_size is None else "group",
            "group_size": layout.group_size,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "memoryless_minmax",
            "observer_kwargs": {},
        }
        token = {
            "num_bits": 8,
            "type": kind,
            "symmetric": True,
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
            "actorder": None,
            "block_structure": None,
            "observer": None,
            "observer_kwargs": {},
        }
        return {
            "targets": list(targets),
            "format": self.format,
            "weights": weights,
            "input_activations": token if self.rounds else None,
            "output_activations": None,
        }


def compressed_config(schemes: Mapping[str, Scheme], ignore: Iterable[str]) -> dict[str, Any]:
    """schemes: of all quantized layers. ignore: the names of all other layers that are multiplied by.

    One scheme is given to the class Linear, several to layers by name: vLLM looks for the class first.
    """
    kinds = list(dict.fromkeys(schemes.values()))
    groups = {}
    for number, scheme in enumerate(kinds):
        named = [name for name, own in schemes.items() if own == scheme]
        groups[f"group_{number}"] = scheme.to_dict(["Linear"] if len(kinds) == 1 else named)
    formats = {scheme.format for scheme in kinds}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "version": VERSION,
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "ignore": list(ignore),
        "config_groups": groups,
    }


def units(names: Iterable[str]) -> Iterable[list[str]]:
    """The sets of layers among `names` that other engines fuse."""
    known = set(names)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
        for unit in UNITS:
            members = [f"{parent}.{own}" if parent else own for own in unit]
            present = [name for name in members if name in known]
            if len(present) > 1:
                yield present

"""The configs: frozen, keyword-only, and validated where they are made. Nothing writes into a config."""

from .layout import Activations, Format, Layout
from .patch_config import (
    DRAFTERS,
    CacheConfig,
    Drafters,
    KeywordsWithoutWeights,
    KVDtype,
    PatchConfig,
    SpeculativeConfig,
    Weights,
    check_patch_keywords,
    parse_cache,
    parse_speculative,
    takes_patch_keywords,
)
from .weight_config import (
    GROUP_SIZES,
    METHODS,
    NF4_BLOCK,
    WEIGHTS,
    Bits,
    GroupSize,
    Method,
    WeightConfig,
    WeightFormat,
    parse_weights,
)

__all__ = [
    "DRAFTERS", "GROUP_SIZES", "METHODS", "NF4_BLOCK", "WEIGHTS", "Activations", "Bits", "CacheConfig", "Drafters",
    "Format", "GroupSize", "KVDtype", "KeywordsWithoutWeights", "Layout", "Method", "PatchConfig", "SpeculativeConfig",
    "WeightConfig", "WeightFormat", "Weights", "check_patch_keywords", "parse_cache", "parse_speculative",
    "parse_weights", "takes_patch_keywords",
]  # fmt: skip

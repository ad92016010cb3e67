"""The numbers that recurrent layers keep of a sequence, from the settings in a model's config."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

from ...models import head_dim

# The settings of layers with the gated delta rule: key heads, value heads, their dimensions, tokens of a convolution.
DELTA_RULE = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
# Those of the rule where keys and values have the same heads: heads, their dimension, tokens of the convolution.
DELTA_ATTENTION = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
# Those of Mamba 2, by the names that families give them: heads, their dimension, the state's size, groups, tokens of
# the convolution.
STATE_SPACES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"),
    ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
)
# Those of them that have a least step for each token of a prompt.
WITH_LEAST_STEP = STATE_SPACES[1:3]
WITHOUT_LIMITS = (0.0, inf)
# Those of Mamba: channels, the state's size, tokens of the convolution. Those of Jamba are a multiple of hidden_size.
CHANNELS = (("intermediate_size", "state_size", "conv_kernel"), ("hidden_size", "mamba_d_state", "mamba_d_conv"))
EXPANSION = "mamba_expand"
# Those of recurrent units without a matrix: channels, tokens of the convolution.
RECURRENT_UNITS = ("lru_width", "conv1d_width")
# Those of lightning attention: heads, and the tokens of a block. The dimension of a head has a name of its own.
LIGHTNING_ATTENTION = ("num_attention_heads", "block_size")
# Those of convolutions of keys, values and the results of parts: width, tokens, heads of keys, their dimension.
CONVOLVED_LAYERS = ("hidden_size", "sconv_kernel_size", "num_key_value_heads", "head_dim")
# Those of two convolutions of queries and keys behind each other: tokens of each, heads of both, their dimension.
CONVOLVED_HEADS = ("cca_time0", "cca_time1", "num_attention_heads", "num_key_value_heads", "head_dim")
# Those of RWKV, all of whose layers are recurrent: channels, width. No other config has the third one.
TIME_MIXES = ("attention_hidden_size", "hidden_size", "rescale_every")
# Those of matrix memories (xLSTM): heads, the dimensions of their keys and values. Other configs lack the last two.
MATRIX_MEMORIES = ("num_heads", "qk_head_dim", "v_head_dim", "chunk_size", "max_inference_chunksize")


class StateSizes(NamedTuple):
    """The numbers of a recurrent layer's state after a token, and of the inputs of its convolution kept with it."""

    state: int
    inputs: int


def state_sizes(config: Any) -> StateSizes | None:
    """Return what a recurrent layer of a decoder's config keeps; None if the config has settings of no known kind."""
    found = _settings(config, DELTA_RULE)
    if found is not None:
        key_heads, value_heads, key_dim, value_dim, tokens = found
        values = value_heads * value_dim
        return StateSizes(key_dim * values, (tokens - 1) * (2 * key_heads * key_dim + values))
    found = _settings(config, DELTA_ATTENTION)
    if found is not None:
        heads, dim, tokens = found
        return StateSizes(heads * dim * dim, (tokens - 1) * 3 * heads * dim)
    for names in STATE_SPACES:
        found = _settings(config, names)
        if found is not None:
            heads, dim, size, groups, tokens = found
            return StateSizes(heads * dim * size, (tokens - 1) * (heads * dim + 2 * groups * size))
    for of_mamba in CHANNELS:
        found = _settings(config, of_mamba)
        if found is not None:
            channels, size, tokens = found
            channels *= getattr(config, EXPANSION, 1)
            return StateSizes(channels * size, (tokens - 1) * channels)
    found = _settings(config, RECURRENT_UNITS)
    if found is not None:
        channels, tokens = found
        return StateSizes(channels, (tokens - 1) * channels)
    found = _settings(config, LIGHTNING_ATTENTION)
    if found is not None:
        heads, _ = found
        return StateSizes(heads * head_dim(config) ** 2, 0)
    return _convolved_sizes(config)


def sizes_without_cache(config: Any) -> StateSizes | None:
    """Return what each layer keeps if all are recurrent in a way that DynamicCache does not know; else None."""
    found = _settings(config, TIME_MIXES)
    if found is not None:
        channels, width, _ = found
        return StateSizes(3 * channels, 2 * width)
    found = _settings(config, MATRIX_MEMORIES)
    if found is not None:
        heads, keys, values, _, _ = found
        return StateSizes(heads * keys * (values + 1), 2 * heads)
    return None


def _convolved_sizes(config: Any) -> StateSizes | None:
    """Return the sizes where short convolutions stand before and behind attention; None for any other config."""
    found = _settings(config, CONVOLVED_LAYERS)
    if found is not None:
        hidden, tokens, heads, dim = found
        return StateSizes(0, 2 * tokens * (hidden + heads * dim))
    found = _settings(config, CONVOLVED_HEADS)
    if found is not None:
        first, second, queries, heads, dim = found
        return StateSizes(heads * dim // 2, (first + second - 2) * (queries + heads) * dim)
    return None


def steps_of_prompts_differ(config: Any) -> bool:
    """Return whether the tokens of a prompt have limits for their steps, which transformers drops while it generates.

    Then a state after generated tokens is not that of a prompt with the same tokens, and they cannot share it.
    """
    names = next((each for each in STATE_SPACES if _settings(config, each) is not None), None)
    limits = getattr(config, "time_step_limit", None) or WITHOUT_LIMITS
    return names is not None and (names in WITH_LEAST_STEP or tuple(limits) != WITHOUT_LIMITS)


def _settings(config: Any, names: tuple[str, ...]) -> list[int] | None:
    """Return the values of a config's settings; None if one is not there, or is no number."""
    try:
        values = [getattr(config, name, None) for name in names]
    except RuntimeError:  # its layers differ in one of them
        return None
    return [each for each in values if isinstance(each, int)] if all(isinstance(v, int) for v in values) else None

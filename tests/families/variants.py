"""Other configurations of a family, drawn at random from the fields that its config class has.

FREE has the values that a field of a name may take; a field that is True or False by default and stands in no table
may be both. Fields that fit each other alone (heads, experts, lists with one entry for each layer) are drawn together,
as one Group. What of a draw stock transformers can build and run is kept (models.py asks `largest_fitting`).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "quick_gelu", "tanh")
ODDS = (131, 137, 149, 160)  # sizes of a vocabulary; the ids of prompts and images are below the smallest
WIDTHS = (40, 64, 72, 100)  # of feed-forwards: multiples of 4, as transformers' own code asks here and there
DTYPES = (torch.float16, *[torch.float32] * 3, torch.bfloat16, *[torch.float32] * 3)  # by the number of a variant
SMALL_ROTATION = 16  # positions for which a rotation was trained
LONG_ONLY = ("Phi3Config", "Phi4MultimodalConfig", "PhimoeConfig")  # which take this rotation, and the usual one
SCANNING = {"mamba_d_state", "state_size", "ssm_state_size"}  # of configs whose layers scan over states
# Whose own cache changes what transformers writes: judged without it, where such a rotation would be another.
OWN_CACHES = ("MiniMaxConfig",)
MOVED = 0.7  # of the groups of fields are others than those of the tiny configuration
Draw = random.Random
Values = dict[str, Any]
Group = tuple[str, str]  # the name of a config class, and that of fields which are drawn together

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": SMALL_ROTATION}
ROTATIONS: tuple[Values, ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    YARN,
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.8},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
    {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": SMALL_ROTATION,
    },
)  # fmt: skip
# Of which the length of the batch makes another: seldom, as transformers' own loop runs them.
CHANGING: tuple[Values, ...] = (
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": SMALL_ROTATION,
        "short_mscale": 1.1, "long_mscale": 1.3,
    },
)  # fmt: skip

# Fields that fit whatever stands beside them.
FREE: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("scale_embedding", "use_qk_norm", "qkv_bias", "use_bias", "bias"), (False, True)
) | dict.fromkeys(
    (
        "hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act", "afn",
        "ff_activation", "mamba_hidden_act", "projector_hidden_act",
    ),
    ACTIVATIONS,
) | dict.fromkeys(
    (
        "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "moe_intermediate_size",
        "shared_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_hidden_size", "d_inner",
        "intermediate_size_mlp", "dense_intermediate_size", "expert_ffn_hidden_size", "dim_ff", "dff",
        "moe_shared_expert_intermediate_size", "prefix_dense_intermediate_size", "shared_experts_intermediate_size",
    ),
    WIDTHS,
) | dict.fromkeys(
    ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "mixer_rms_eps", "eps"),
    (1e-6, 1e-3),
) | dict.fromkeys(
    ("conv_kernel", "conv_kernel_size", "mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache",
     "short_conv_kernel_size", "conv1d_width"),
    (2, 3, 4),
) | dict.fromkeys(
    ("mamba_d_state", "state_size", "ssm_state_size"), (4, 8, 20)
) | dict.fromkeys(
    ("mamba_dt_rank", "time_step_rank"), (2, 4, 7)
) | dict.fromkeys(
    ("chunk_size", "mamba_chunk_size", "block_size"), (4, 7, 16)
) | dict.fromkeys(
    ("final_logit_softcapping", "attn_logit_softcapping"), (None, 2.0, 5.0)
) | dict.fromkeys(  # Windows are of two tokens at least: for one, transformers' own cache keeps all tokens.
    ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), (2, 3, 5, 7, 12, 30)
) | {
    "moe_latent_size": (None, 16, 40), "time_step_min": (0.001, 0.3), "time_step_max": (0.4, 1.0),
    "altup_active_idx": (0, 1), "vision_feature_layer": (-1, -2),
    "*_multiplier": (1.0, 0.5, 1.7), "logits_scaling": (1.0, 0.5, 1.7), "mlp_multipliers": ([1.0, 1.0], [0.7, 1.3]),
    "ssm_multipliers": ([1.0] * 5, [0.5, 0.8, 1.1, 1.4, 0.9]), "attention_multiplier": (0.1, 0.25),
    "*rout*_scaling_factor": (1.0, 0.5, 1.7), "route_scale": (1.0, 0.5, 1.7),
    "attention_value_scale": (None, 0.7, 1.5),
    "full_attn_*_factor": (1.0, 0.8, 1.3), "linear_attn_*_factor": (1.0, 0.8, 1.3), "mlp_*_factor": (1.0, 0.8, 1.3),
    "scale_emb": (1, 2, 12), "scale_depth": (1.0, 1.4), "dim_model_base": (16, 32, 64), "embedding_scale": (None, 4.0),
    "query_pre_attn_scalar": (8, 16, 50), "q_lora_rank": (None, 24, 32), "o_lora_rank": (16, 32),
    "kv_lora_rank": (16, 24, 40), "qk_rope_head_dim": (4, 8, 16), "qk_nope_head_dim": (8, 16, 24),
    "v_head_dim": (8, 16, 24), "linear_key_head_dim": (8, 16, 24), "linear_value_head_dim": (8, 16, 32),
    "feed_forward_proj": ("relu", "gated-gelu"),
    "relative_attention_max_distance": (8, 16, 40), "relative_attention_num_buckets": (4, 8, 12),
    "clip_qkv": (None, 1.0), "hidden_size_per_layer_input": (0, 8, 16),
    "swiglu_limit": (1.0, 7.0), "swiglu_alpha": (1.0, 1.702), "logit_scale": (0.0625, 1.0), "d_kv": (8, 16, 24),
    "attention_chunk_size": (7, 16, 32), "local_attention": (4, 6, 12), "index_topk": (2, 4, 8, 30),
    # Of few heads all can be zero for many keys, of which transformers itself then chooses others behind padding.
    "index_n_heads": (16, 24), "index_head_dim": (8, 16, 24),
    "qk_dim_factor": (0.5, 1.0), "gate_soft_cap": (5.0, 15.0), "output_logit_soft_cap": (5.0, 30.0),
    "logits_soft_cap": (2.0, 30.0), "rescale_every": (0, 1, 6), "pretraining_tp": (1, 2),
    "time_step_limit": ((0.0, float("inf")), (0.01, 0.1)), "no_rope_layer_interval": (1, 2),
    "rotary_dim": (4, 8, 16), "rotary_pct": (0.25, 0.5, 1.0), "rotary_emb_base": (100, 10000),
    "rope_theta": (100.0, 10000.0), "floor_scale": (2, 4, 8192), "attn_scale": (0.1, 0.5),
    "word_embed_proj_dim": (32, 64), "num_ln_in_parallel_attn": (None, 1, 2), "alibi_bias_max": (4, 8),
    "softmax_scale": (None, 0.1), "expansion_ratio": (2, 4), "altup_num_inputs": (2, 3, 4), "laurel_rank": (4, 8),
    "altup_coef_clip": (None, 0.5, 120.0), "block_multiple_of": (8, 32), "block_ffn_dim_multiplier": (1.0, 1.3),
    "expert_layer_period": (1, 2), "expert_layer_offset": (0, 1), "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [0], [1]),
    "interleave_moe_layer_step": (1, 2), "moe_layer_start_index": (0, 1), "moe_layer_interval": (1, 2),
    "moe_layer_end_index": (0, 1), "sliding_window_pattern": (1, 2, 3), "global_attn_every_n_layers": (1, 2, 3),
    "scoring_func": ("softmax", "sigmoid", "sqrtsoftplus"), "score_function": ("softmax", "sigmoid"),
    "expert_selection_fn": ("softmax", "sigmoid"), "shared_expert_combination_strategy": ("sum", "average"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"), "router_jitter_noise": (0.0,),
    "adapter_rank": (4, 8), "num_mem_blocks": (1, 2), "num_memory_blocks": (1, 2),
    "position_embedding_type": (None, "rope"),
    "hc_mult": (2, 4), "swa_head_dim": (8, 16, 24), "swa_v_head_dim": (8, 16), "global_head_dim": (8, 16, 32),
    "linear_head_dim": (8, 16, 24), "attention_k_eq_v": (False, True), "embedding_size": (32, 64),
    "attention_types": ([[["global", "local"], 1]], [[["local"], 2]], [[["local", "global"], 1]]),
}  # fmt: skip

# Of training, of what a call returns, of how a kernel is chosen, or of what another model the class is for.
NEVER = (
    "_*", "*dropout*", "*_pdrop", "*_drop", "*layerdrop*", "init*", "*loss*", "output_*", "return_*", "use_cache",
    "is_*", "add_cross_attention", "chunk_size_feed_forward", "summary_*", "problem_type", "use_*kernels",
    "use_mambapy", "use_associative_scan", "use_mem_eff_path", "use_bidirectional_attention", "prefix_lm", "*prompt*",
    "*weighted_layer*", "apply_spec_augment", "*use_mems*", "bi_data", "causal", "attn_uses_sequence_id",
    "tie_encoder_decoder",
    "cross_attn_all_layers", "patch_in_forward", "share_encoder_decoder_embeddings", "encoder_no_repeat_ngram_size",
)  # fmt: skip


@dataclasses.dataclass
class Draws:
    """What the variant of a number changes; left_out: groups of fields that keep the values of a tiny config.

    found: the groups that were drawn, in the order of classes and names.
    """

    seed: int
    left_out: frozenset[Group] = frozenset()
    found: list[Group] = dataclasses.field(default_factory=list)
    values: dict[str, Values] = dataclasses.field(default_factory=dict)  # what was drawn, by the name of the class

    def of(self, kind: type[PreTrainedConfig], small: Values, *, is_part: bool) -> Values:
        """Values for some fields of a config class; the same seed draws the same ones for the same group.

        small: the values of a tiny config. is_part: of a config with parts, whose widths and vocabularies fit each
        other.
        """
        fields = _Fields(kind, small, self.seed, is_part=is_part)
        values: Values = {}
        for name, make in fields.groups():
            group, draw = (kind.__name__, name), Draw(f"{kind.__name__} {name} {self.seed}")
            if draw.random() >= MOVED and name not in ("heads", "layers", "rotations"):
                continue
            made = make(small | values, draw)
            if not made or all(name in small and small[name] == value for name, value in made.items()):
                continue
            self.found.append(group)
            if group not in self.left_out:
                values |= made
        if values:
            self.values[kind.__name__] = values
        return values


def largest_fitting(works: Callable[[frozenset[Group]], bool], groups: list[Group]) -> frozenset[Group]:
    """The groups to leave out so that the rest works together; works: whether all but some do.

    Halves are added to what is known to work, so that few of many tries are needed to find a group that does not fit.
    """
    everything = frozenset(groups)

    def add(kept: frozenset[Group], more: list[Group]) -> frozenset[Group]:
        if not more or works(everything - kept - frozenset(more)):
            return kept | frozenset(more)
        if len(more) == 1:
            return kept
        half = len(more) // 2
        return add(add(kept, more[:half]), more[half:])

    return everything - add(frozenset(), groups)


def dtype_of(seed: int) -> torch.dtype:
    """The dtype of the variant of this number."""
    return DTYPES[seed % len(DTYPES)]


Make = Callable[[Values, Draw], Values]


class _Fields:
    """The fields of a config class, and what may be drawn for them together."""

    def __init__(self, kind: type[PreTrainedConfig], small: Values, seed: int, *, is_part: bool) -> None:
        self.types = {field.name: field.type for field in dataclasses.fields(kind)}
        self.names = self.types.keys()
        self.default = _default(kind)
        self.small, self.seed, self.is_part = small, seed, is_part

    def groups(self) -> list[tuple[str, Make]]:
        """By name, in the order in which they are drawn: later ones see what earlier ones have drawn."""
        joint: list[tuple[str, Make]] = [("heads", self._heads), ("layers", self._layers)]
        joint += [("vocabulary", self._vocabulary), ("experts", self._experts)]
        joint += [("delta heads", self._delta_heads), ("period", self._period)]
        taken = {"tie_word_embeddings"} if self.is_part else set()
        free = [name for name in sorted(self.names - taken) if (self.alternatives(name) and self._may_be(name))]
        return joint + [(name, self._one(name)) for name in free] + [("rotations", self._rotations)]

    def alternatives(self, name: str) -> tuple[Any, ...]:
        usual = "silu" if FREE.get(name) is ACTIVATIONS else False if name == "use_bias" else None
        if usual is not None and self.names & SCANNING:  # what is not usual goes to transformers, which tells little
            return (usual,) * 2 * len(FREE[name]) + FREE[name]
        if name in FREE:
            return FREE[name]
        if any(fnmatch.fnmatch(name, pattern) for pattern in NEVER):
            return ()
        found = next((values for pattern, values in FREE.items() if fnmatch.fnmatch(name, pattern)), ())
        return found or ((False, True) if isinstance(self._value(name), bool) else ())

    def _value(self, name: str) -> Any:
        try:
            return self.small.get(name, getattr(self.default, name, None))
        except RuntimeError:  # of another for each layer
            return None

    def _may_be(self, name: str) -> bool:
        """Whether a config's field is of one number for all layers, and one that the model is made with."""
        value = self._value(name)
        if isinstance(value, list | tuple) != any(isinstance(one, list | tuple) for one in self.alternatives(name)):
            return value is None
        return name not in ("final_logit_softcapping", "sliding_window") or hasattr(self.default, name)

    def _takes_none(self, name: str) -> bool:
        return "None" in str(self.types[name]) or "Optional" in str(self.types[name])

    def _one(self, name: str) -> Make:
        def made(values: Values, draw: Draw) -> Values:
            value = draw.choice([one for one in self.alternatives(name) if one is not None or self._takes_none(name)])
            if self.alternatives(name) is WIDTHS and dtype_of(self.seed) != torch.float32:
                value += -value % 8  # as transformers' products of experts ask in half precision
            return {name: list(value) if isinstance(value, list) else value}

        return made

    def _vocabulary(self, values: Values, draw: Draw) -> Values:
        if self.is_part or "vocab_size" not in self.names:
            return {}
        return dict.fromkeys(self.names & {"vocab_size", "vocab_size_per_layer_input"}, draw.choice(ODDS))

    def _heads(self, small: Values, draw: Draw) -> Values:
        values = self._attention_heads(small, draw)
        return values | self._scan(small | values, draw)

    def _attention_heads(self, small: Values, draw: Draw) -> Values:
        """Heads, as many of keys as divide them, and the widths that follow from them."""
        names = self.names
        widths = [name for name in ("hidden_size", "n_embd", "d_model", "embed_dim") if name in names]
        width = small.get(widths[0], self._value(widths[0])) if widths else None
        many = [n for n in ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads") if n in names]
        if "expand" in names and "num_heads" in many:  # the heads of a scan
            many.remove("num_heads")
        sides = [n for n in ("encoder_attention_heads", "decoder_attention_heads") if n in names]
        if not isinstance(width, int):
            return {}
        if "kv_lora_rank" in small or not (many or sides):
            heads = draw.choice((2, 3, 4, 6))
            found = {"num_attention_heads": heads, "num_key_value_heads": heads} if "kv_lora_rank" in small else {}
            return found if self.is_part else found | dict.fromkeys(widths, heads * draw.choice((8, 16, 24)))
        if self.is_part:
            heads = draw.choice((2, 4, 8))
        else:
            heads = draw.choice((2, 3, 4, 6, 8))
            width = heads * draw.choice((8, 16, 24, 32))
        values = dict.fromkeys(many, heads) | {name: draw.choice(_divisors(width)) for name in sides}
        values |= {} if self.is_part else dict.fromkeys(widths, width)
        if "lru_width" in names and not self.is_part:
            values["lru_width"] = width
        if "head_dim" in names and "head_dim" in small:
            values["head_dim"] = draw.choice((8, 12, 16, 24, 32))
        ratio = draw.choice([n for n in (1, 2, 3, 4, 8) if heads % n == 0])
        return values | dict.fromkeys(
            names & {"num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"}, heads // ratio
        )

    def _experts(self, small: Values, draw: Draw) -> Values:
        """Experts, groups that divide them, and how many of each a token gets."""
        names = self.names
        many = names & {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
        if not many or all(small.get(name, 0) is None for name in many):
            return self._experts_beside(draw) if "enable_moe_block" in names else {}
        groups = draw.choice((1, 2)) if "n_group" in names else 1
        count = groups * draw.choice((2, 3, 4))
        of_group = draw.randint(1, groups)
        most = min(3, of_group * count // groups)
        values = dict.fromkeys(many, count)
        top = names & {
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "moe_k",
            "top_k_experts",
            "moe_top_k",
        }
        values |= dict.fromkeys(top, draw.randint(1, most))
        values |= {"n_group": groups, "topk_group": of_group} if "n_group" in names else {}
        shared = names & {"num_shared_experts", "n_shared_experts", "moe_num_shared_experts"}
        return values | dict.fromkeys(shared, draw.choice((1, 1, 2, 0)))

    def _experts_beside(self, draw: Draw) -> Values:
        """Of Gemma 4, whose layers have experts beside a feed-forward, or none."""
        count = draw.choice((3, 4))
        return {
            "enable_moe_block": True, "num_experts": count, "top_k_experts": draw.randint(1, 3),
            "moe_intermediate_size": draw.choice((32, 40)),
        }  # fmt: skip

    def _scan(self, values: Values, draw: Draw) -> Values:
        """Heads of a scan over states, which together are a few times as wide as the model, and groups of them."""
        names = self.names
        if not (names & {"mamba_n_heads", "mamba_num_heads"} or {"expand", "num_heads", "head_dim"} <= names):
            if "expand" in names or "mamba_expand" in names:
                return dict.fromkeys(names & {"expand", "mamba_expand"}, draw.choice((1, 2, 3)))
            return {}
        wide = draw.choice((1, 2, 2, 3))
        inner = wide * values["hidden_size"]
        size = draw.choice([n for n in (8, 16, 24, 32) if inner % n == 0])
        heads = inner // size
        groups = draw.choice([n for n in (1, 2, 3, 4) if heads % n == 0])
        found: Values = dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), heads)
        found |= dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), size) | {"mamba_d_ssm": inner}
        found |= dict.fromkeys(("mamba_expand", "expand"), wide)
        found |= dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), groups)
        if "expand" in names and "num_heads" in names:
            found |= {"num_heads": heads, "head_dim": size}
        if "n_mamba_heads" in names:  # of Zamba 2, which says how wide a head is by how many there are
            found["n_mamba_heads"] = heads
        return {name: value for name, value in found.items() if name in names}

    def _delta_heads(self, values: Values, draw: Draw) -> Values:
        """Heads of keys, and as many of values for each of them."""
        keys = draw.choice((1, 2, 3, 4))
        found = {"linear_num_key_heads": keys, "linear_num_value_heads": keys * draw.choice((1, 2, 3))}
        found["linear_num_heads"] = keys
        return {name: value for name, value in found.items() if name in self.names}

    def _period(self, values: Values, draw: Draw) -> Values:
        """Which layers attend, where a period says it."""
        period = draw.choice((1, 2, 2, 3, 3))
        count = values.get("num_hidden_layers", period)
        found = {"attn_layer_period": period, "attn_layer_offset": draw.randrange(min(period, count))}
        return found if found.keys() <= self.names else {}

    def _layers(self, small: Values, draw: Draw) -> Values:
        """Layers of the kinds that the family has, in any mix; as many as any, where nothing else is told for each."""
        names = self.names
        named = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers")
        counts = [n for n in named if n in names and isinstance(self._value(n), int)]
        listed = {name for name in names & {"layer_types", "block_types", "layers_block_type"} if self._value(name)}
        if not counts and not listed:
            return {}
        count = self._value(counts[0]) if counts else len(self._value(min(listed)))
        listed |= {n for n, v in small.items() if isinstance(v, list | tuple) and len(v) == count and n in names}
        values: Values = {}
        is_fixed = self._value("num_kv_shared_layers") or any(map(_is_nested, small.values()))
        if not is_fixed and "per_layer_config" not in small:
            count = draw.choice((1, 2, 3, 3, 4))
            values |= dict.fromkeys(names & {*counts, "encoder_layers"}, count)
            # A T5 has a cache for no more layers than its encoder has.
            values |= dict.fromkeys(names & {"decoder_layers", "num_decoder_layers"}, draw.randint(1, min(count, 3)))
            values |= dict.fromkeys(names & {"num_blocks"}, count)
        for name in sorted(listed):
            entries = _distinct(small.get(name) or self._value(name))
            entries = ["dense", "sparse"] if name == "mlp_layer_types" and entries == ["sparse"] else entries
            values[name] = [draw.choice(entries) for _ in range(count)]
            attending = [kind for kind in entries if str(kind).endswith(("attention", "hybrid"))]
            attending = [kind for kind in attending if kind != "linear_attention"]
            if attending and not set(attending) & set(values[name]):  # as caches of states alone count no tokens
                values[name][draw.randrange(count)] = draw.choice(attending)
        if "max_window_layers" in names:
            values["max_window_layers"] = draw.randrange(count + 1)
        for name in names & {"first_k_dense_replace", "num_dense_layers"}:
            values[name] = draw.randrange(count + 1)
        for name in names & {"attn_layer_indices", "full_attn_idxs"}:
            values[name] = sorted(draw.sample(range(count), draw.randint(1, count)))
        if "num_kv_shared_layers" in names and "layer_types" in listed and count > 2:
            shared = values["num_kv_shared_layers"] = draw.choice((0, 1, count - 2))
            own = values["layer_types"][: count - shared]  # of the same kinds as those behind them
            kinds = _distinct(own)[: shared or None]
            behind = (kinds + draw.choices(kinds, k=shared))[:shared]
            values["layer_types"] = [kind if kind in kinds else kinds[0] for kind in own] + behind
        return values

    def _rotations(self, values: Values, draw: Draw) -> Values:
        """One of transformers' rotations for all layers, or one for each kind of them."""
        parameters = values.get("rope_parameters", self._value("rope_parameters"))
        if not isinstance(parameters, dict) or "max_position_embeddings" not in self.names:
            return {}  # of patches, which have another
        kinds = (ROTATIONS[0], CHANGING[1]) if type(self.default).__name__ in LONG_ONLY else ROTATIONS
        if kinds is ROTATIONS and draw.random() < 0.12 and type(self.default).__name__ not in OWN_CACHES:
            kinds = CHANGING

        def made(one: Values) -> Values:
            return _rotation(one, dict(draw.choice(kinds)), values, draw)

        if "rope_theta" in parameters:
            found = made(parameters)
        elif parameters and all(isinstance(one, dict) and "rope_theta" in one for one in parameters.values()):
            found = {name: made(one) for name, one in parameters.items()}
        else:
            return {}
        types = [one["rope_type"] for one in (found.values() if "rope_type" not in found else [found])]
        few = {"max_position_embeddings": SMALL_ROTATION} if "dynamic" in types or draw.random() < 0.2 else {}
        longrope = {"original_max_position_embeddings": SMALL_ROTATION} if "longrope" in types else {}
        return {"rope_parameters": found} | {name: v for name, v in (few | longrope).items() if name in self.names}


def _default(kind: type[PreTrainedConfig]) -> Any:
    try:
        return kind()
    except Exception:  # composite configs want their parts
        return None


def _distinct(entries: Any) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        if entry not in found:
            found.append(entry)
    return found


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(entry, list | tuple | dict) for entry in value)


def _divisors(width: int) -> list[int]:
    return [n for n in (1, 2, 3, 4, 6, 8) if width % n == 0 and (width // n) % 8 == 0]


def _rotation(parameters: Values, chosen: Values, values: Values, draw: Draw) -> Values:
    """The chosen rotation for a config that has these parameters."""
    size = values.get("head_dim") or values.get("qk_rope_head_dim")
    if values.get("qk_rope_head_dim"):
        size = values["qk_rope_head_dim"]
    size = size or values.get("hidden_size", 64) // values.get("num_attention_heads", 4)
    part = parameters.get("partial_rotary_factor")
    if parameters.get("rope_type") in ("proportional", "axial"):
        return parameters | {"rope_theta": draw.choice((100.0, 1e4))}
    kept: Values = {}
    if part is not None:
        fitting = [part for part in (0.25, 0.5, 0.75, 1.0) if int(size * part) % 2 == 0]
        if values.get("kv_lora_rank"):
            fitting = [values["qk_rope_head_dim"] / (values["qk_rope_head_dim"] + values["qk_nope_head_dim"])]
        kept["partial_rotary_factor"] = part = draw.choice(fitting)
    if "llama_4_scaling_beta" in parameters:  # queries grow with their positions
        kept["llama_4_scaling_beta"] = draw.choice((0.1, 0.5))
        kept["original_max_position_embeddings"] = SMALL_ROTATION // 4
    if "mrope_section" in parameters:  # of the rotated halves: time, height and width
        half = int(size * (part or 1.0)) // 2
        side = draw.randint(0, half // 3)
        sections = [half - 2 * side, side, side]
        return parameters | kept | {"rope_theta": draw.choice((100.0, 1e4)), "mrope_section": sections}
    if chosen["rope_type"] == "longrope":
        half = int(size * (part or 1.0)) // 2
        chosen["short_factor"] = [round(draw.uniform(0.8, 2), 2) for _ in range(half)]
        chosen["long_factor"] = [round(draw.uniform(1, 6), 2) for _ in range(half)]
    return chosen | kept | {"rope_theta": draw.choice((100.0, 1e4))}

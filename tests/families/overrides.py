"""What the names of a config's fields cannot say about a tiny one of its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    EncoderDecoderConfig,
    PreTrainedConfig,
    SpeechEncoderDecoderConfig,
    VisionEncoderDecoderConfig,
)

ALIKE = {"num_key_value_heads": 4}  # as many as query heads
WORDS = {"<image>": 120, "<|extra_0|>": 121} | {f"IMGIMG{letter}Z": 122 + i for i, letter in enumerate("ABCD")}
VISUAL_WORDS = WORDS | {"<|extra_200|>": 126} | {f"<|visual token {code:06d}|>": 122 + code for code in range(4)}
BYTE_LATENT = {"hidden_size_global": 64, "num_key_value_heads": 4}
TOKENIZER = {"num_filters": 4, "downsampling_ratios": (2, 2), "depths": (1, 1, 1), "hidden_size": 64}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
SLIDING_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "head_dim": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
TILES = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
WINDOWS = {"window_size": 32}  # pixels
IMAGE_IDS = {"image_token_id": 120, "video_token_id": 121}
PARTS = ("encoder", "decoder")
CONFORMER = {"input_dim": 16, "hidden_dim": 64, "context_size": 16, "max_pos_emb": 32}
STACKED = {"deepstack_visual_indexes": [0, 1]}
NO_EXPERTS = {"num_experts": None, "num_experts_per_tok": None, "top_k_experts": None}

# As all published checkpoints have them.
POSITIONS = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
BUCKETS = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}

# By the name of the config's class.
OVERRIDES: dict[str, dict[str, Any]] = {
    "AlbertConfig": {"embedding_size": 32},
    "Apertus1p5Config": {"image_token_offset": 122, "audio_token_offset": 126},
    "Apertus1p5VisionTokenizerConfig": {"codebook_size": 4, "base_channels": 32, "embed_dim": 32}
    | {"latent_channels": 32, "channel_multiplier": (1, 1), "resolution": 32},
    "AriaConfig": {"projector_patch_to_query_dict": {16: 4}},
    "BambaConfig": {"attn_layer_indices": [1]},
    "Blip2Config": {"image_token_index": 120},
    "BltConfig": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "BltLocalDecoderConfig": BYTE_LATENT,
    "BltLocalEncoderConfig": BYTE_LATENT,
    "ChameleonConfig": {"vocabulary_map": WORDS},
    "ChameleonVQVAEConfig": {"num_embeddings": 4, "channel_multiplier": (1, 1, 1, 1), "embed_dim": 32},
    "CohereCompassTextConfig": {
        "rope_parameters": {"sliding_attention": SECTIONS, "full_attention": SECTIONS},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "CohereCompassVisionConfig": STACKED,
    "DbrxAttentionConfig": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
    "DbrxFFNConfig": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    "GraniteDoclingVisionConfig": STACKED,
    "DebertaConfig": POSITIONS,
    "DebertaV2Config": POSITIONS | BUCKETS,
    "DeepseekOcr2SamVisionConfig": {"downsample_channels": [32, 64]},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    | {"global_head_dim": 16},
    "DiffusionGemmaConfig": {"canvas_length": 8},
    "Dots3NoteTextConfig": {
        "num_key_value_heads": 4,
        "head_dim": 24,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "layer_types": ["indexed_attention", "indexed_attention", "sliding_attention"],
        "per_layer_config": {2: SLIDING_LATENT},
    },
    "Dots3NoteAudioConfig": {"adapter_input_size": 64},
    "Dots3NoteVisionConfig": {"adapter_in_dim": 64},
    "DoryConfig": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Emu3Config": {"vocabulary_map": VISUAL_WORDS},
    "Emu3VQVAEConfig": {"codebook_size": 4, "hidden_size": 128},
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": SECTIONS | {"mrope_section": [3, 3, 2]},
    },
    "EsmcConfig": ALIKE | {"vocab_size": 131},
    "EvollaConfig": {"aligner_num_add_layers": 1, "resampler_depth": 1, "resampler_heads": 4, "resampler_dim_head": 16}
    | {"resampler_num_latents": 4},
    "Exaone4_5_VisionConfig": WINDOWS,
    "Florence2VisionConfig": {
        "depths": (1, 1),
        "embed_dim": (32, 64),
        "num_heads": (2, 4),
        "num_groups": (2, 4),
        "patch_size": (7, 3),
        "patch_stride": (4, 2),
        "patch_padding": (3, 1),
        "patch_prenorm": (False, True),
        "projection_dim": 64,
    },
    "Gemma3nTextConfig": {
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    }
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "Gemma4TextConfig": {"global_head_dim": 16} | NO_EXPERTS,
    "Gemma4UnifiedTextConfig": {"global_head_dim": 16} | NO_EXPERTS,
    "Gemma4UnifiedVisionConfig": {"output_proj_dims": 64, "mm_embed_dim": 64, "mm_posemb_size": 64},
    "Glm5NextTextConfig": ALIKE | {"qk_rope_head_dim": 0, "index_topk": 16, "index_kpool": 4},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "Granite4VisionConfig": TILES
    | {
        "downsample_rate": "2/4",
        "deepstack_layer_map": [(-1, 0), (-2, 1)],
        "spatial_target_layers": [0, 0, 1, 1],
    },
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "HYV4VLTextConfig": {"rope_parameters": SECTIONS | {"mrope_section": [2, 1, 1]}},
    "InstructBlipConfig": {"image_token_index": 120},
    "InstructBlipVideoConfig": {"video_token_index": 120},
    "Inkling2VisionConfig": {"position_embedding_size": 64},
    "JanusVQVAEConfig": {"channel_multiplier": (1, 1), "image_token_embed_dim": 64, "num_patches": 16},
    "JanusVisionConfig": {"projection_dim": 64},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Kosmos2_5Config": {"latent_query_num": 8},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Llama4VisionConfig": {"intermediate_size": 256},
    "LlavaNextConfig": TILES,
    "LlavaNextVideoConfig": TILES,
    "LlavaOnevisionConfig": TILES,
    "GlmAsrEncoderConfig": {"intermediate_size": 256},  # four frames at once
    "GraniteSpeechConfig": {"window_size": 15},
    "GraniteSpeechPlusConfig": {"window_size": 15},
    "GraniteSpeechEncoderConfig": CONFORMER,
    "GraniteSpeechPlusEncoderConfig": CONFORMER,
    "Kosmos2Config": {"latent_query_num": 4},
    "LEDConfig": {"attention_window": 8},
    "LongcatFlashConfig": {"head_dim": 8},
    "LukeConfig": {"entity_vocab_size": 64, "entity_emb_size": 32},
    "Mamba2Config": {"num_heads": 8},
    "MiniCPM3Config": {"dim_model_base": 32},
    "MiniCPMOcrConfig": IMAGE_IDS,
    "MiniCPMV4_6Config": IMAGE_IDS,
    "MiniCPMV4_7Config": IMAGE_IDS,
    "MptConfig": {"use_cache": True},
    "MllamaVisionConfig": {"max_num_tiles": 4, "intermediate_layers_indices": [0, 1], "vision_output_dim": 192},
    "MllamaTextConfig": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "Molmo2AdapterConfig": {"vision_feature_layer": [-1, -2]},
    "Molmo2Config": {"image_patch_id": 120},
    "Molmo2VisionConfig": {"image_size": [32, 32], "num_position_embeddings": 16},
    "MoonshineConfig": {
        f"{part}_num_{heads}": 4 for part in PARTS for heads in ("attention_heads", "key_value_heads")
    },
    "MPNetConfig": {"relative_attention_num_buckets": 32},
    "MuseGlimmerConfig": {"out_hidden_size": 256},
    "MuseSparkConfig": {"out_hidden_size": 256},
    "MuseSparkAudioConfig": {"hidden_sizes": (16, 16, 32, 32), "depths": (1, 1, 1, 1)},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "Nemotron3_5TranscribeAsrAudioConfig": ALIKE,
    "Nemotron3_5TranscribeWordTimestampConfig": ALIKE,
    "Nemotron3DiarizationAudioConfig": ALIKE,
    "NemotronConfig": {"num_key_value_heads": 2},
    "PaddleOCRTextConfig": {"rope_parameters": SECTIONS},
    "ParakeetEncoderConfig": {"projection_hidden_size": 64},
    "PerceiverConfig": {"num_latents": 16, "d_latents": 64, "num_self_attends_per_block": 2}
    | {"num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    "Phi4MultimodalAudioConfig": {
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
        "nemo_conv_channels": 32,
        "bias_max_distance": 32,
        "input_size": 16,
    },
    "Pix2StructVisionConfig": {"patch_embed_hidden_size": 192},
    "Kosmos2_5VisionConfig": {"patch_embed_hidden_size": 192},
    "PPFormulaNetVisionConfig": {
        "post_conv_in_channels": 64,
        "post_conv_mid_channels": 64,
        "post_conv_out_channels": 64,
    },
    "Qwen2_5OmniVisionEncoderConfig": WINDOWS,
    "Qwen2_5_VLVisionConfig": WINDOWS,
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 125, "vision_end_token_id": 126},
    "Qwen2Config": {"use_sliding_window": True},
    "Qwen3OmniMoeAudioEncoderConfig": {"downsample_hidden_size": 16},
    "Qwen3OmniMoeVisionEncoderConfig": STACKED,
    "Qwen3VLVisionConfig": STACKED,
    "Qwen3VLMoeVisionConfig": STACKED,
    "Qwen3ASREncoderConfig": {"downsample_hidden_size": 16},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 125, "vision_end_token_id": 126},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 2,
        "heads_per_ngram": 2,
    },
    "RadioConfig": {"video_temporal_patch_size": 2, "max_img_size": 64},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {
        "is_decoder": True,
        "axial_pos_shape": (4, 8),
        "axial_pos_embds_dim": (32, 32),
        "attn_layers": ("local", "lsh"),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "feed_forward_size": 96,
    },
    "RoCBertConfig": {"shape_vocab_size": 131, "shape_embed_dim": 32, "pronunciation_vocab_size": 131}
    | {"pronunciation_embed_dim": 32},
    "Step3p7TextConfig": {"sliding_window": 6},
    "SamVisionConfig": {"global_attn_indexes": [1]},
    "UdopConfig": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    "UnlimitedOcrSamVisionConfig": {"downsample_channels": [32, 64]},
    "VibeVoiceAcousticTokenizerEncoderConfig": TOKENIZER,
    "VibeVoiceAcousticTokenizerConfig": TOKENIZER,
    "VipLlavaConfig": {"vision_feature_layers": [-1, -2], "vision_feature_layer": [-1, -2]},
    "VoxtralConfig": {"audio_token_id": 120},
    "VoxtralEncoderConfig": {"intermediate_size": 256},  # four frames at once
    "WavTokenizerEncoderConfig": {
        "codebook_dim": 64,
        "codebook_size": 4,
        "num_filters": 4,
        "upsampling_ratios": (2, 2),
    },
    "XmodConfig": {"default_language": "en_XX"},
    "xLSTMConfig": {"qk_dim_factor": 1.0},
    "ZambaConfig": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"],
    },
}

# By the name of the model's class.
OF_MODELS: dict[str, dict[str, Any]] = {
    "ReformerForMaskedLM": {"is_decoder": False},
    "BigBirdForCausalLM (is_decoder)": {"attention_type": "original_full"},  # blocks see tokens behind them
}

CONSTRUCTED: dict[str, Callable[[Callable[[str], PreTrainedConfig]], PreTrainedConfig]] = {
    "encoder-decoder": lambda tiny: EncoderDecoderConfig.from_encoder_decoder_configs(tiny("bert"), tiny("bert")),
    "speech-encoder-decoder": lambda tiny: SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
        tiny("wav2vec2"), tiny("gpt2")
    ),
    "vision-encoder-decoder": lambda tiny: VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        tiny("vit"), tiny("gpt2")
    ),
}

"""The catalogue's models: dimensions as their authors published them, one line per model.

A line: name, the family's COLUMNS, then `field=value` (JSON) or one of WORDS, then `|` and other names of the model.
Values are JSON. Dimensions in which two checkpoints of one name differ are those of the instruction-tuned one.
"""

from typing import Any

USUAL = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
USUAL += " max_position_embeddings"
MOE = USUAL + " num_experts_per_tok"
LATENT = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
LATENT += " num_experts_per_tok n_routed_experts n_shared_experts moe_intermediate_size first_k_dense_replace"
LATENT += " q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
HYBRID = MOE + " num_experts moe_intermediate_size shared_expert_intermediate_size head_dim linear_num_key_heads"
HYBRID += " linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"

COLUMNS = {
    "bloom": "vocab_size hidden_size n_layer n_head",
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT + " index_n_heads index_head_dim index_topk",
    "falcon": "vocab_size hidden_size num_hidden_layers num_attention_heads",
    "gemma2": USUAL + " head_dim sliding_window",
    "gemma3_text": USUAL + " head_dim sliding_window",
    "glm_moe_dsa": LATENT + " index_n_heads index_head_dim index_topk",
    "gpt2": "vocab_size n_embd n_layer n_head n_positions",
    "gpt_neox": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads",
    "gpt_oss": MOE + " num_local_experts head_dim sliding_window",
    "kimi_k2": LATENT,
    "llama": USUAL,
    "llama4_text": MOE + " num_local_experts intermediate_size_mlp interleave_moe_layer_step head_dim",
    "mimo_v2_flash": MOE + " n_routed_experts moe_intermediate_size head_dim v_head_dim swa_num_attention_heads"
    " swa_num_key_value_heads swa_head_dim swa_v_head_dim sliding_window",
    "minimax_m2": MOE + " num_local_experts head_dim",
    "mistral": USUAL + " sliding_window",
    "mixtral": MOE + " num_local_experts",
    "opt": "vocab_size hidden_size ffn_dim num_hidden_layers num_attention_heads",
    "phi": USUAL,
    "phi3": USUAL + " sliding_window",
    "qwen2": USUAL,
    "qwen3": USUAL + " head_dim",
    "qwen3_5_moe_text": HYBRID,
    "qwen3_moe": MOE + " num_experts moe_intermediate_size head_dim",
    "qwen3_next": HYBRID,
    "t5": "vocab_size d_model d_kv d_ff num_layers num_heads",
}

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WORDS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "gated": {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},  # T5 1.1 and FLAN
    "fp8": {"quantization_config": BLOCK_FP8},
    "fp8_minimax": {
        "quantization_config": BLOCK_FP8 | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
    },
    "mxfp4": {  # the experts alone
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    },
    "int4_experts": {  # the routed experts alone
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
            "ignore": ["lm_head", "self_attn", "shared_experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
        }
    },
    "one_in_six_full": {
        "hybrid_layer_pattern": [0 if i == 0 or i % 6 == 5 else 1 for i in range(48)],
        "moe_layer_freq": [0] + [1] * 47,
    },
}

ENTRIES = {
    "llama": """
        LLaMA-7B         32000  4096 11008  32  32 32   2048
        LLaMA-13B        32000  5120 13824  40  40 40   2048
        LLaMA-30B        32000  6656 17920  60  52 52   2048 | LLaMA-33B
        LLaMA-65B        32000  8192 22016  80  64 64   2048
        Vicuna-7B        32000  4096 11008  32  32 32   4096 | Vicuna-7B-v1.5
        Vicuna-13B       32000  5120 13824  40  40 40   4096 | Vicuna-13B-v1.5
        Vicuna-33B       32000  6656 17920  60  52 52   2048 | Vicuna-33B-v1.3
        TinyLlama-1.1B   32000  2048  5632  22  32  4   2048 | TinyLlama-1.1B-Chat-v1.0
        Llama-2-7B       32000  4096 11008  32  32 32   4096
        Llama-2-13B      32000  5120 13824  40  40 40   4096
        Llama-2-70B      32000  8192 28672  80  64  8   4096
        CodeLlama-34B    32000  8192 22016  48  64  8  16384
        Llama-3-8B      128256  4096 14336  32  32  8   8192
        Llama-3-70B     128256  8192 28672  80  64  8   8192
        Llama-3.1-8B    128256  4096 14336  32  32  8 131072 | DeepSeek-R1-Distill-Llama-8B
        Llama-3.1-70B   128256  8192 28672  80  64  8 131072
        Llama-3.1-405B  128256 16384 53248 126 128  8 131072
        Llama-3.2-1B    128256  2048  8192  16  32  8 131072 tied
        Llama-3.2-3B    128256  3072  8192  28  24  8 131072 tied
        Llama-3.3-70B   128256  8192 28672  80  64  8 131072 | DeepSeek-R1-Distill-Llama-70B
        Yi-6B            64000  4096 11008  32  32  4   4096
        Yi-34B           64000  7168 20480  60  56  8   4096
    """,
    "llama4_text": """
        Llama-4-Scout-17B-16E     202048 5120 8192 48 40 8 10485760 1  16 16384 1 128 | Llama-4-Scout
        Llama-4-Maverick-17B-128E 202048 5120 8192 48 40 8  1048576 1 128 16384 2 128 use_qk_norm=false|Llama-4-Maverick
    """,
    "mistral": """
        Mistral-7B-v0.1      32000  4096 14336 32 32 8  32768 4096 | Mistral-7B
        Mistral-7B-v0.2      32000  4096 14336 32 32 8  32768 null
        Mistral-7B-v0.3      32768  4096 14336 32 32 8  32768 null
        Mistral-Nemo-2407   131072  5120 14336 40 32 8 131072 null head_dim=128 | Mistral-Nemo Mistral-Nemo-12B
        Mistral-Small-24B   131072  5120 32768 40 32 8  32768 null head_dim=128 | Mistral-Small-24B-2501
        Mistral-Large-2407   32768 12288 28672 88 96 8 131072 null head_dim=128 | Mistral-Large Mistral-Large-123B
    """,
    "mixtral": """
        Mixtral-8x7B-v0.1           32000 4096 14336 32 32 8 32768 2 8 | Mixtral-8x7B
        Mixtral-8x22B-v0.1          32000 6144 16384 56 48 8 65536 2 8 | Mixtral-8x22B
        Mixtral-8x22B-Instruct-v0.1 32768 6144 16384 56 48 8 65536 2 8 | Mixtral-8x22B-Instruct
    """,
    "qwen2": """
        Qwen2.5-0.5B 151936  896  4864 24 14 2 32768 tied | Qwen2-0.5B
        Qwen2.5-1.5B 151936 1536  8960 28 12 2 32768 tied | Qwen2-1.5B
        Qwen2.5-3B   151936 2048 11008 36 16 2 32768 tied
        Qwen2.5-7B   152064 3584 18944 28 28 4 32768 | Qwen2-7B
        Qwen2.5-14B  152064 5120 13824 48 40 8 32768
        Qwen2.5-32B  152064 5120 27648 64 40 8 32768
        Qwen2.5-72B  152064 8192 29568 80 64 8 32768 | Qwen2-72B
    """,
    "qwen3": """
        Qwen3-0.6B    151936 1024  3072 28 16 8 40960 128 tied
        Qwen3-1.7B    151936 2048  6144 28 16 8 40960 128 tied
        Qwen3-4B      151936 2560  9728 36 32 8 40960 128 tied
        Qwen3-8B      151936 4096 12288 36 32 8 40960 128
        Qwen3-14B     151936 5120 17408 40 40 8 40960 128
        Qwen3-32B     151936 5120 25600 64 64 8 40960 128
        Qwen3-32B-FP8 151936 5120 25600 64 64 8 40960 128 fp8
    """,
    "qwen3_moe": """
        Qwen3-30B-A3B         151936 2048 6144 48 32 4  40960 8 128  768 128
        Qwen3-30B-A3B-FP8     151936 2048 6144 48 32 4  40960 8 128  768 128 fp8
        Qwen3-30B-A3B-2507    151936 2048 6144 48 32 4 262144 8 128  768 128 | Qwen3-30B-A3B-Thinking-2507
        Qwen3-235B-A22B      151936 4096 12288 94 64 4  40960 8 128 1536 128
        Qwen3-235B-A22B-FP8  151936 4096 12288 94 64 4  40960 8 128 1536 128 fp8
        Qwen3-235B-A22B-2507 151936 4096 12288 94 64 4 262144 8 128 1536 128 | Qwen3-235B-A22B-Thinking-2507
        Qwen3-Coder-480B-A35B 151936 6144 8192 62 96 8 262144 8 160 2560 128
    """,
    "qwen3_next": """
        Qwen3-Next-80B-A3B 151936 2048 5120 48 16 2 262144 10 512 512 512 256 16 32 128 128 4
    """,
    "qwen3_5_moe_text": """
        Qwen3.5-35B-A3B   248320 2048 null 40 16 2 262144  8 256  512  512 256 16 32 128 128 4
        Qwen3.5-397B-A17B 248320 4096 null 60 32 2 262144 10 512 1024 1024 256 16 64 128 128 4
    """,
    "phi": """
        Phi-1.5 51200 2048  8192 24 32 32 2048
        Phi-2   51200 2560 10240 32 32 32 2048
    """,
    "phi3": """
        Phi-3-mini-4k    32064 3072  8192 32 32 32   4096 2047 | Phi-3-mini
        Phi-3-mini-128k  32064 3072  8192 32 32 32 131072 null | Phi-3.5-mini
        Phi-3-medium-4k  32064 5120 17920 40 40 10   4096 2047 | Phi-3-medium
        Phi-4           100352 5120 17920 40 40 10  16384 null
        Phi-4-mini      200064 3072  8192 32 24  8 131072 null tied
    """,
    "gemma2": """
        Gemma-2-2B  256000 2304  9216 26  8  4 8192 256 4096
        Gemma-2-9B  256000 3584 14336 42 16  8 8192 256 4096
        Gemma-2-27B 256000 4608 36864 46 32 16 8192 128 4096
    """,
    "gemma3_text": """
        Gemma-3-1B  262144 1152  6912 26  4  1  32768 256  512
        Gemma-3-4B  262208 2560 10240 34  8  4 131072 256 1024
        Gemma-3-12B 262208 3840 15360 48 16  8 131072 256 1024
        Gemma-3-27B 262208 5376 21504 62 32 16 131072 128 1024
    """,
    "opt": """
        OPT-125M 50272   768  3072 12 12
        OPT-350M 50272  1024  4096 24 16 word_embed_proj_dim=512 do_layer_norm_before=false
        OPT-1.3B 50272  2048  8192 24 32
        OPT-2.7B 50272  2560 10240 32 32
        OPT-6.7B 50272  4096 16384 32 32
        OPT-13B  50272  5120 20480 40 40
        OPT-30B  50272  7168 28672 48 56
        OPT-66B  50272  9216 36864 64 72
        OPT-175B 50272 12288 49152 96 96
    """,
    "gpt2": """
        GPT-2        50257   768 12 12 1024 | GPT-2-small
        GPT-2-medium 50257  1024 24 16 1024
        GPT-2-large  50257  1280 36 20 1024
        GPT-2-XL     50257  1600 48 25 1024
        GPT-3-175B   50257 12288 96 96 2048 | GPT-3
    """,
    "gpt_neox": """
        GPT-NeoX-20B 50432 6144 24576 44 64
        Pythia-70M   50304  512  2048  6  8
        Pythia-160M  50304  768  3072 12 12
        Pythia-410M  50304 1024  4096 24 16
        Pythia-1B    50304 2048  8192 16  8
        Pythia-1.4B  50304 2048  8192 24 16
        Pythia-2.8B  50304 2560 10240 32 32
        Pythia-6.9B  50432 4096 16384 32 32
        Pythia-12B   50688 5120 20480 36 40
    """,
    "bloom": """
        BLOOM-7B1  250880  4096 30  32
        BLOOM-176B 250880 14336 70 112 | BLOOM
    """,
    "falcon": """
        Falcon-7B   65024  4544 32  71
        Falcon-40B  65024  8192 60 128 new_decoder_architecture=true num_kv_heads=8
        Falcon-180B 65024 14848 80 232 new_decoder_architecture=true num_kv_heads=8 tie_word_embeddings=false
    """,
    "deepseek_v2": """
        DeepSeek-V2-Lite 102400 2048 10944 27  16 163840 6  64 2 1408 1 null 512 128 64 128
        DeepSeek-V2      102400 5120 12288 60 128 163840 6 160 2 1536 1 1536 512 128 64 128
    """,
    "deepseek_v3": """
        DeepSeek-V3 129280 7168 18432 61 128 163840 8 256 1 2048 3 1536 512 128 64 128 fp8 | DeepSeek-V3-0324
        DeepSeek-V3.1 129280 7168 18432 61 128 163840 8 256 1 2048 3 1536 512 128 64 128 fp8
        DeepSeek-R1 129280 7168 18432 61 128 163840 8 256 1 2048 3 1536 512 128 64 128 fp8 | DeepSeek-R1-0528
    """,
    "deepseek_v32": """
        DeepSeek-V3.2 129280 7168 18432 61 128 163840 8 256 1 2048 3 1536 512 128 64 128 64 128 2048 fp8
    """,
    "kimi_k2": """
        Kimi-K2   163840 7168 18432 61 64 131072 8 384 1 2048 1 1536 512 128 64 128 fp8
        Kimi-K2.5 163840 7168 18432 61 64 262144 8 384 1 2048 1 1536 512 128 64 128 int4_experts | Kimi-K2-Thinking
    """,
    "glm_moe_dsa": """
        GLM-5 154880 6144 12288 78 64 202752 8 256 1 2048 3 2048 512 192 64 256 32 128 2048
    """,
    "minimax_m2": """
        MiniMax-M2.5 200064 3072 1536 62 48 8 196608 8 256 128 fp8_minimax | MiniMax-M2
    """,
    "mimo_v2_flash": """
        MiMo-V2-Flash 152576 4096 16384 48 64 4 262144 8 256 2048 192 128 64 8 192 128 128 one_in_six_full fp8
    """,
    "gpt_oss": """
        gpt-oss-20b  201088 2880 2880 24 64 8 131072 4  32 64 128 mxfp4
        gpt-oss-120b 201088 2880 2880 36 64 8 131072 4 128 64 128 mxfp4
    """,
    "t5": """
        T5-small       32128  512  64  2048  6   8
        T5-base        32128  768  64  3072 12  12
        T5-large       32128 1024  64  4096 24  16
        T5-3B          32128 1024 128 16384 24  32
        T5-11B         32128 1024 128 65536 24 128
        FLAN-T5-small  32128  512  64  1024  8   6 gated | T5-v1_1-small
        FLAN-T5-base   32128  768  64  2048 12  12 gated | T5-v1_1-base
        FLAN-T5-large  32128 1024  64  2816 24  16 gated | T5-v1_1-large
        FLAN-T5-XL     32128 2048  64  5120 24  32 gated | T5-v1_1-XL T5-XL
        FLAN-T5-XXL    32128 4096  64 10240 24  64 gated | T5-v1_1-XXL T5-XXL
    """,
}
"""family -> its lines"""

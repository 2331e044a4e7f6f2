"""What is served: a small Llama with random weights, on a CPU core or a GPU. Nothing is downloaded.

The tokenizer has one word per token, so a text has as many tokens as words, however it is cut: prompts are exactly as
long as the benchmark asks for.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PORT = 18765
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 8192,
}  # fmt: skip
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


@dataclass(frozen=True)
class Setup:
    """A device's model, server and load. Lengths in tokens are means; each is drawn between half and one and a half."""

    config: dict[str, Any]
    serve: tuple[str, ...]
    inputs: int
    outputs: int
    prompts: int
    """of a run"""
    prefix: int
    several: int
    """clients of the second run that is fitted"""
    repeats: int
    """of a run that is predicted"""

    def write(self, folder: Path) -> None:
        """The model's folder as `vllm serve` takes it."""
        folder.mkdir(parents=True, exist_ok=True)
        names = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), self.config["vocab_size"]))]
        added = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokenizer = {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "decoder": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
            "added_tokens": [{"id": i, "content": word, **added} for i, word in enumerate(SPECIAL)],
            "model": {"type": "WordLevel", "vocab": {name: i for i, name in enumerate(names)}, "unk_token": "<unk>"},
        }  # fmt: skip
        tokens = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192, **tokens}
        for name, document in {
            "config": LLAMA | self.config,
            "tokenizer": tokenizer,
            "tokenizer_config": about,
        }.items():
            (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")


COMMON = f"tiny --host 127.0.0.1 --port {PORT} --load-format dummy --dtype bfloat16 --enable-prefix-caching"
SETUPS = {
    "cpu": Setup(  # 108 MB, more than a core's caches hold, so that a step reads its weights from memory
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
         "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096},
        tuple(f"{COMMON} --max-model-len 2048 --max-num-seqs 64 --max-num-batched-tokens 512 --block-size 32"
              " --enforce-eager --no-async-scheduling --kv-cache-memory-bytes 256M".split()),
        inputs=160, outputs=48, prompts=60, prefix=384, several=8, repeats=3,
    ),
    "cuda": Setup(  # Llama-3.1-8B's shapes
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
        tuple(f"{COMMON} --max-model-len 8192 --max-num-seqs 256 --max-num-batched-tokens 8192"
              " --kv-cache-memory-bytes 40G".split()),
        inputs=1024, outputs=128, prompts=200, prefix=2048, several=32, repeats=2,
    ),
}  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
CLIENT = (
    f"bench serve --model tiny --host 127.0.0.1 --port {PORT} --save-result --save-detailed --ignore-eos"
    " --temperature 0 --ready-check-timeout-sec 0 --dataset-name random --random-range-ratio 0.5"
).split()
"""without the request that the client tries first: its prompt would be found in the cache"""

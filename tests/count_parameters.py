"""Writes tests/parameters.json: what Hugging Face's classes count for each model of the catalogue, on the meta device.

For families of which the catalogue names no model, also what the default of transformers' class is and counts
("classes"). Needs transformers (not a test dependency); run as `python tests/count_parameters.py [NAME ...]`. Families
that transformers has no class for are left out. A vision-language model counts with its text model and LM head alone.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from infersim.models.catalog import entry, names

FILE = Path(__file__).with_name("parameters.json")


def config_of(name):
    """The entry as transformers' own class takes it; None where it has none."""
    fields = entry(name)
    family = fields.pop("model_type")
    fields.pop("quantization_config", None)
    if "attn_type_list" in fields:
        words = {0: "linear_attention", 1: "full_attention"}
        fields["layer_types"] = [words[kind] for kind in fields.pop("attn_type_list")]
    if "hybrid_override_pattern" in fields:
        words = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
        fields["layers_block_type"] = [words[letter] for letter in fields.pop("hybrid_override_pattern")]
    if family == "lfm2_moe":
        full = fields.pop("full_attn_idxs")
        fields["layer_types"] = ["full_attention" if i in full else "conv" for i in range(fields["num_hidden_layers"])]
    if family == "granitemoehybrid":
        words = {"mamba": "linear_attention", "attention": "full_attention"}
        fields["layer_types"] = [words[kind] for kind in fields["layer_types"]]
    fields = {key: value for key, value in fields.items() if value is not None or key == "q_lora_rank"}
    try:
        return AutoConfig.for_model(family, **{"tie_word_embeddings": False, **fields} if "vl" in family else fields)
    except ValueError as error:
        if "Unrecognized model identifier" in str(error):
            return None
        raise


def count(config, tied):
    with torch.device("meta"):
        for kind in (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModel):
            try:
                model = kind.from_config(config)
            except ValueError:  # none of this kind
                continue
            total = sum(parameter.numel() for parameter in model.parameters())
            head = 0 if kind is not AutoModel or tied else config.vocab_size * config.hidden_size
            return total + head
    raise ValueError(f"{config.model_type}: no class")


CLASSES = ("aria_text", "flint", "glm5_next_text", "granitemoe_swa", "hy_v4", "iquestcoder", "kolibri1", "lara_mini",
           "lfm3", "mellum", "nanochat")  # fmt: skip


def defaults(family):
    """The default config's fields and its parameters."""
    config = AutoConfig.for_model(family)
    usual = transformers.PreTrainedConfig().to_dict()
    fields = {k: v for k, v in config.to_dict().items() if k not in usual or k in ("model_type", "tie_word_embeddings")}
    fields = {k: v for k, v in fields.items() if v is not None and not isinstance(v, float | dict)}
    return [fields | {"model_type": family}, count(config, config.tie_word_embeddings)]


def main():
    transformers.logging.set_verbosity_error()
    found, left_out = json.loads(FILE.read_text())["parameters"] if sys.argv[1:] else {}, []
    for name in sys.argv[1:] or names():
        try:
            config = config_of(name)
            if config is None:
                left_out.append(name)
            else:
                found[name] = count(config, entry(name).get("tie_word_embeddings", False))
        except Exception as error:
            print(f"{name}: {str(error)[:200]}")
    document = {"transformers": transformers.__version__, "torch": torch.__version__}
    document["parameters"] = {name: found[name] for name in names() if name in found}
    text = json.dumps(document, indent=1).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(family)}: {json.dumps(defaults(family))}" for family in CLASSES)
    FILE.write_text(f'{text},\n "classes": {{\n{rows}\n }}\n}}\n')
    print(f"{len(found)} counted, without a class: {', '.join(left_out)}")


if __name__ == "__main__":
    main()

"""What the catalogue's models are called on Hugging Face: repositories as their organisations published them."""

import re

REPOSITORIES = (
    (r"Llama-2-(\d+)B", r"meta-llama/Llama-2-\1b-hf"),
    (r"Llama-3-(\d+B)", r"meta-llama/Meta-Llama-3-\1"),
    (r"(Llama-3\.[12]-\d+B(?:-Instruct)?|Llama-4-.*)", r"meta-llama/\1"),
    (r"(Llama-3\.3-70B)", r"meta-llama/\1-Instruct"),
    (r"LLaMA-(\d+)B", r"huggyllama/llama-\1b"),
    (r"TinyLlama-1\.1B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    (r"CodeLlama-(\d+)B", r"codellama/CodeLlama-\1b-hf"),
    (r"(Yi-\d+B)", r"01-ai/\1"),
    (r"Mistral-7B-v0\.2", "mistralai/Mistral-7B-Instruct-v0.2"),
    (r"Mistral-(Nemo|Large)-2407", r"mistralai/Mistral-\1-Instruct-2407"),
    (r"(Mistral-7B-v0\.[13]|Mixtral-.*)", r"mistralai/\1"),
    (r"(Qwen3-(?:30B-A3B|235B-A22B))-2507", r"Qwen/\1-Instruct-2507"),
    (r"(Qwen3-(?:Coder|Next)-.*?)", r"Qwen/\1-Instruct"),
    (r"(Qwen.*)", r"Qwen/\1"),
    (r"(DeepSeek-.*)", r"deepseek-ai/\1"),
    (r"(Phi-3-.*)", r"microsoft/\1-instruct"),
    (r"Phi-2", "microsoft/phi-2"),
    (r"Phi-4", "microsoft/phi-4"),
    (r"(Phi-4-mini)", r"microsoft/\1-instruct"),
    (r"Gemma-(2)-(\d+)B", r"google/gemma-\1-\2b"),
    (r"Gemma-(3)-(\d+)B", r"google/gemma-\1-\2b-it"),
    (r"Gemma-(\d+)B", r"google/gemma-\1b"),
    (r"(QwQ-32B)", r"Qwen/\1"),
    (r"StarCoder2-(\d+)B", r"bigcode/starcoder2-\1b"),
    (r"(SmolLM[23]-.*)", r"HuggingFaceTB/\1"),
    (r"(Falcon3-\d+B)", r"tiiuae/\1-Base"),
    (r"(Codestral-22B-v0\.1)", r"mistralai/\1"),
    (r"OPT-([\d.]+)(B|M)", lambda m: f"facebook/opt-{m[1]}{m[2].lower()}"),
    (r"GPT-2(.*)", lambda m: f"openai-community/gpt2{m[1].lower()}"),
    (r"GPT-NeoX-20B", "EleutherAI/gpt-neox-20b"),
    (r"Pythia-([\d.]+)(B|M)", lambda m: f"EleutherAI/pythia-{m[1]}{m[2].lower()}"),
    (r"BLOOM-7B1", "bigscience/bloom-7b1"),
    (r"Falcon-(7|40)B", r"tiiuae/falcon-\1b"),
    (r"Falcon-180B", "tiiuae/falcon-180B"),
    (r"(Kimi-K2)", r"moonshotai/\1-Instruct"),
    (r"(Kimi-.*)", r"moonshotai/\1"),
    (r"(GLM-.*)", r"zai-org/\1"),
    (r"(MiniMax-.*)", r"MiniMaxAI/\1"),
    (r"(MiMo-.*)", r"XiaomiMiMo/\1"),
    (r"(gpt-oss-.*)", r"openai/\1"),
)  # fmt: skip


def repository(model: str) -> str | None:
    """The Hugging Face repository of a model as a scenario names it: the name itself if it has an organisation or is a
    path; None where the catalogue's name is no repository's."""
    if "/" in model or model.endswith(".json"):
        return model.removesuffix("/config.json")
    for pattern, published in REPOSITORIES:
        if match := re.fullmatch(pattern, model, re.IGNORECASE):
            return published(match) if callable(published) else match.expand(published)
    return None

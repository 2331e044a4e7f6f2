"""What is not recomputed, and why: the committed list."""

from .claims import Claim, not_applicable

REASONS = {
    "lev.tab3": ("Leviathan et al. 2023", "measured acceptance of pairs of models: an input here"),
    **{
        f"branchy.tab1.{network}.{device}": (
            "Teerapittayanon et al. 2016",
            "time of a plain network in one framework on one machine: an input of the gain beside it",
        )
        for network in ("LeNet", "AlexNet", "ResNet")
        for device in ("CPU", "GPU")
    },
    "branchy.loss": ("Teerapittayanon et al. 2016", "a training objective"),
    "fa1.v1.fig2": ("Dao et al. 2022, first version", "replaced by other numbers for the same figure in version 2"),
    "fa.tflops.tables": ("FlashAttention READMEs", "a table of kernel rates: an input of the cost model"),
    "vllm.fig13a.vllm": ("Kwon et al. 2023, PagedAttention", "gives early vLLM's time per sequence: an input"),
    "vllm.fig13b.orca_oracle": ("Kwon et al. 2023, PagedAttention", "gives the spread of Alpaca's lengths: an input"),
    "vllm.fig15.parallel2": ("Kwon et al. 2023, PagedAttention", "gives the spread of Alpaca's prompts: an input"),
    "vllm.fig15.beam4": ("Kwon et al. 2023, PagedAttention", "gives how often beams turn over on Alpaca: an input"),
    "vllm.fig11": ("Kwon et al. 2023, PagedAttention", "mean lengths: an input"),
    "vllm.fig18a": ("Kwon et al. 2023, PagedAttention", "what a kernel costs: a calibration"),
    "eagle1.ablation": ("Li et al. 2024, EAGLE", "an ablation of a trained drafter"),
    "eagle2.calib": ("Li et al. 2024, EAGLE-2", "how well a trained drafter knows its own chances"),
    "specbench.a100.v7b": ("Spec-Bench leaderboard", "calibrates the methods' time per step for the two larger models"),
    "vllm.spec.ngram": ("vLLM blog 2024-10-17", "read off a figure; lengths and acceptance are not printed"),
    "kivi": ("Liu et al. 2024, KIVI", "GPU, lengths and batch are not printed"),
    "gptq.speed": ("Frantar et al. 2022, GPTQ", "recalled, not read in the paper"),
    "awq.speed": ("Lin et al. 2023, AWQ", "recalled, not read in the paper"),
    "orca": ("Yu et al. 2022, Orca", "at equal latency with a batching that the paper tunes by hand"),
    "distserve.head": ("Zhong et al. 2024, DistServe", "a maximum over clusters of two pools"),
    "distserve.sim": ("Zhong et al. 2024, DistServe", "the error of another simulator"),
    "splitwise": ("Patel et al. 2024, Splitwise", "clusters of two pools, priced by contracts that are not printed"),
    "sglang.hit": ("Zheng et al. 2024, SGLang", "hit rates on prompts that are not published"),
    "mooncake.tab2": ("Qin et al. 2025, Mooncake", "statistics of traces: an input"),
    "mooncake.prod": ("Qin et al. 2025, Mooncake", "a production system"),
    "mooncake.prefill_gpu": ("Qin et al. 2025, Mooncake", "three clusters on traces of which one is published"),
    "calm": ("Schuster et al. 2022, CALM", "the cost of its exit decisions is not printed"),
    "layerskip.head": (
        "Elhoushi et al. 2024, LayerSkip",
        "exit layers and acceptance of the best rows are not printed",
    ),
    "eellm": ("Chen et al. 2023, EE-LLM", "thresholds and tasks are not printed"),
    "apparate": ("Dai et al. 2024, Apparate", "medians over models and traces that are not printed"),
}


def claims() -> tuple[Claim, ...]:
    return tuple(not_applicable(id, source, reason) for id, (source, reason) in REASONS.items())

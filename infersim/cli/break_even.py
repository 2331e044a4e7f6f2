"""`infersim show break-even`."""

from typing import Annotated, Any

from typer import Argument, Option

from .guard import guarded
from .options import Json, Overrides
from .printing import print_json, print_rows, print_wrapped


@guarded
def break_even(
    scenario: Annotated[str, Argument(help="Scenario name or path.")],
    overrides: Overrides = None,
    context: Annotated[int, Option(min=1, help="Tokens of context of every sequence.")] = 1024,
    as_json: Json = False,
) -> None:
    """Where speculation, INT4 weights, early exit, offloaded KV, two-batch overlap and prefill context parallelism stop
    paying for a deployment."""
    from infersim.config.scenario import load_scenario
    from infersim.deployment import deployment_of
    from infersim.explain import break_even as economics
    from infersim.workload.acceptance import acceptance_table

    description = load_scenario(scenario, overrides or [])
    deployment = deployment_of(description.model_copy(update={"early_exit": None}))
    context = min(context, deployment.engine.max_model_len)
    document: dict[str, Any] = {
        "context": context,
        "int4_crossover_rows": economics.int4_crossovers(deployment.hardware),
    }
    if deployment.speculation is not None:
        cost, draft = deployment.step_cost(), deployment.draft_cost()
        assert draft is not None
        tokens = acceptance_table(deployment.speculation).tokens_by_drafts(len(draft.passes) - 1)
        seqs = deployment.engine.max_num_seqs
        rows = economics.speculation_over_batch(cost, draft, tokens, context, seqs)
        over_context = economics.speculation_over_context(cost, draft, tokens, seqs, deployment.engine.max_model_len)
        document["speculation"] = {
            "method": deployment.speculation.method,
            "over_batch": rows,
            "negative_from_batch": economics.crossing(rows, "batch"),
            "over_context": over_context,
            "negative_from_context": economics.crossing(over_context, "context"),
        }
    if description.early_exit is not None:
        document["early_exit"] = economics.early_exit_over_batch(
            description.early_exit, deployment.placement, deployment.engine, context
        )
    knobs = deployment.knobs()
    if knobs["tier_blocks"].any():
        rows = economics.loading_over_prompt(knobs, deployment.step_cost(), deployment.memory.block_bytes)
        document["kv_offloading"] = rows
    parallelism = deployment.parallelism
    others = {
        "enable_dbo": parallelism.enable_dbo and {"enable_dbo": False},
        "prefill_context": parallelism.prefill_context > 1
        and {"prefill_context": 1, "tensor": parallelism.tensor * parallelism.prefill_context},
    }
    for name, changes in others.items():
        if changes:
            other = parallelism.model_copy(update=changes)
            rows = economics.prompts_over_tokens(deployment.placement, deployment.engine, other)
            document[name] = {"over_tokens": rows, "pays_from_tokens": economics.pays_from(rows)}
    if as_json:
        print_json(document)
    else:
        _print_break_even(document)


def _print_break_even(document: dict[str, Any]) -> None:
    from infersim.explain.change import plain

    spec = document.get("speculation")
    if spec is None:
        print_wrapped("speculation: none in this scenario; --set speculation={...} describes it")
    elif not spec["over_batch"]:
        print_wrapped("speculation: max_num_batched_tokens is too small to verify the drafts of one sequence")
    else:
        _print_speculation(spec, document["context"])
    kernels = ", ".join(f"{name} from {rows:,}" for name, rows in document["int4_crossover_rows"].items() if rows)
    print_wrapped(
        f"INT4 weights no longer gain over 16 bits (rows of a linear layer): {kernels or 'unknown for this device'}"
    )
    if exits := document.get("early_exit"):
        share = exits["needed_share"]
        print_wrapped(f"early exit (approximate: outputs change), {exits['policy'].replace('_', ' ')}")
        print_wrapped(
            f"one sequence gains from {share:.1%} of tokens at the first exit on; described are {exits['share']:.1%}"
        )
        print_rows([{k: plain(v, 3) for k, v in row.items()} for row in exits["over_batch"]])
    if loads := document.get("kv_offloading"):
        print_wrapped("offloaded KV: a prompt alone is computed, or loaded but for its last block")
        print_rows([{k: plain(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in loads])

    for name, against in (("enable_dbo", "one batch"), ("prefill_context", "as many tensor-parallel GPUs")):
        if found := document.get(name):
            pays = found["pays_from_tokens"]
            print_wrapped(
                f"{name} against {against}: pays {f'from {pays:,} tokens of a prompt on' if pays else 'for no prompt'}"
            )
            print_rows([{k: plain(v, 3) if isinstance(v, float) else v for k, v in row.items()}
                        for row in found["over_tokens"]])  # fmt: skip


def _print_speculation(spec: dict[str, Any], context: int) -> None:
    from infersim.explain.change import plain

    print_wrapped(f"speculation ({spec['method']}), {context:,} tokens of context")
    rows = [
        {name: plain(value, 3) if isinstance(value, float) else value for name, value in row.items()}
        for row in spec["over_batch"]
    ]
    print_rows(rows)
    batch, tokens = spec["negative_from_batch"], spec["negative_from_context"]
    print_wrapped(f"turns negative: {f'from batch {batch:,}' if batch else 'at no batch up to the largest'}")
    if over := spec["over_context"]:
        contexts = ", ".join(f"{plain(row['gain'], 3)} at {row['context']:,}" for row in over)
        negative = f"; negative from {tokens:,}" if tokens else ""
        print_wrapped(f"gain at batch {over[0]['batch']} by context: {contexts}{negative}")

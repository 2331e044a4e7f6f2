"""All claims, in the order in which they are reported."""

from . import (
    attention,
    bandwidth,
    drafters,
    early_exit,
    kv_capacity,
    kv_rates,
    kv_recovery,
    kv_sharing,
    law,
    serving,
    speculation,
    systems,
)
from .claims import Claim, not_applicable, printed

MODULES = (law, bandwidth, kv_capacity, kv_sharing, kv_rates, kv_recovery, speculation, drafters, early_exit, attention,
           serving, systems)  # fmt: skip


def all_claims() -> tuple[Claim, ...]:
    """Every claim that `infersim reproduce` knows."""
    computed = tuple(claim for module in MODULES for claim in module.claims())
    return computed + tuple(not_applicable(id) for id, row in printed().items() if "reason" in row)

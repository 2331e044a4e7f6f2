"""All claims, in the order in which they are reported."""

from . import (
    branchynet,
    drafters,
    flashattention,
    inapplicable,
    kv_capacity,
    kv_rates,
    kv_recovery,
    kv_sharing,
    leviathan,
    relations,
    serving,
    systems,
)
from .claims import Claim
from .notes import NOTES


def all_claims() -> tuple[Claim, ...]:
    """Every claim that `infersim reproduce` knows."""
    modules = (
        relations, kv_capacity, kv_sharing, kv_rates, kv_recovery, leviathan, branchynet, flashattention, drafters,
        serving, systems, inapplicable,
    )  # fmt: skip
    return NOTES + tuple(claim for module in modules for claim in module.claims())

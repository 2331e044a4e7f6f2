"""Entries of a step: who is in it, with how many tokens. Compiled.

An entry's tokens and the drafts among them are one number, tokens << DRAFT_BITS | drafts: one is written for each token
of a run.
"""

from .njit import compiled, inlined

DRAFT_BITS = 16


@inlined
def write_entry(step, tokens, entry, q, n, num_drafts, samples):
    """Request q is in the step with n tokens, so many of them drafts to verify."""
    tokens[entry] = n << DRAFT_BITS | num_drafts
    step[entry] = q if samples else ~q


@compiled
def num_tokens_of(core, entry):
    """Tokens of an entry, drafts included."""
    return core.tokens[entry] >> DRAFT_BITS


@compiled
def num_drafts_of(core, entry):
    """Drafts that an entry verifies."""
    return core.tokens[entry] & ((1 << DRAFT_BITS) - 1)

"""Which experts a step touches, and how unevenly their work falls on the ranks that hold them."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from infersim.config.parallelism import Parallelism
from infersim.models.architecture import MoE

TILE = 16
"""tokens that an expert's kernel computes at least; Triton's and CUTLASS's grouped GEMMs start at blocks of 16"""


@dataclass(frozen=True)
class Routing:
    """How the tokens of one layer spread over experts, and experts over `ranks`.

    skew: exponent of a Zipf law over the experts' popularity (0: all alike). Expert e of N is in a token's choice with
    probability min(1, c / e**skew), with c such that these add up to the k experts of a token. redundant: copies, each
    of the expert whose copies have most to do, which they share (DeepSeek's EPLB, replicate_experts).
    """

    num_experts: int
    experts_per_token: int
    ranks: int = 1
    skew: float = 0.0
    redundant: int = 0

    @classmethod
    def of(cls, moe: MoE, parallelism: Parallelism) -> "Routing":
        ranks, skew, redundant = parallelism.expert, parallelism.expert_skew, parallelism.num_redundant_experts
        return cls(moe.num_experts, moe.num_experts_per_token, ranks, skew, redundant)

    @property
    def held(self) -> float:
        """Experts of one rank, copies included."""
        return (self.num_experts + self.redundant) / self.ranks

    @property
    def chances(self) -> np.ndarray:
        """f8[num_experts + redundant]: the chance that a token is routed to an expert or copy, largest first; their sum
        is experts_per_token."""
        return _copied(self.num_experts, self.experts_per_token, self.skew, self.redundant)

    def touched(self, tokens) -> np.ndarray:
        """Expected experts of one rank that at least one of `tokens` tokens is routed to, mean over the ranks."""
        grid, touched = _touched(self.num_experts, self.experts_per_token, self.skew, self.redundant)
        return np.interp(np.log1p(tokens), grid, touched) / self.ranks

    def imbalance(self, tokens) -> np.ndarray:
        """Work of the busiest rank over the mean, expected.

        Popularity: experts are dealt out to the ranks in order of popularity, back and forth, as load balancers do.
        Chance: the largest of `ranks` sums of about Poisson counts, sqrt(2 ln(ranks) / mean) above the mean.
        """
        if self.ranks == 1:
            return np.ones(np.shape(tokens))
        tokens = np.asarray(tokens, dtype=float)
        mean = np.maximum(tokens * self.experts_per_token / self.ranks, 1e-9)
        fluctuation = np.sqrt(2.0 * np.log(self.ranks) / mean)
        return np.minimum(_popular(self) * (1.0 + fluctuation), float(self.ranks))

    def computed(self, tokens) -> np.ndarray:
        """Expert tokens of the mean rank that its kernel computes: each touched expert's are filled up to a tile."""
        routed = np.asarray(tokens, dtype=float) * self.experts_per_token / self.ranks
        return filled(routed, self.touched(tokens))


def filled(routed, touched) -> np.ndarray:
    """Tokens that the kernels of the touched experts compute: each one's are filled up to a tile."""
    return np.maximum(routed + touched * TILE / 2, touched * TILE)


@lru_cache(maxsize=64)
def _chances(num_experts: int, k: int, skew: float) -> np.ndarray:
    popularity = np.arange(1, num_experts + 1, dtype=float) ** -skew
    low, high = 0.0, k / popularity.min() + 1.0
    for _ in range(100):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(1.0, c * popularity).sum() < k else (low, c)
    return np.round(np.minimum(1.0, high * popularity), 12)


@lru_cache(maxsize=64)
def _copied(num_experts: int, k: int, skew: float, redundant: int) -> np.ndarray:
    chances = _chances(num_experts, k, skew)
    copies = np.ones(num_experts, dtype=int)
    for _ in range(redundant):
        copies[np.argmax(chances / copies)] += 1
    return np.sort(np.repeat(chances / copies, copies))[::-1]


@lru_cache(maxsize=64)
def _touched(num_experts: int, k: int, skew: float, redundant: int) -> tuple[np.ndarray, np.ndarray]:
    """Expected experts that t tokens touch, at log(1 + t): exact up to 128 tokens, 2 % apart beyond (the curve is
    concave and smooth: straight lines between such points err by less than 0.01 %)."""
    tokens = np.unique(np.concatenate([np.arange(129), np.geomspace(129, 2e7, 620).round()]))
    values, counts = np.unique(
        _copied(num_experts, k, skew, redundant), return_counts=True
    )  # equal experts are taken together
    missed = np.exp(np.log(np.maximum(1.0 - values, 1e-300)) * tokens[:, None])
    return np.log1p(tokens), ((1.0 - missed) * counts).sum(-1)


@lru_cache(maxsize=64)
def _popular(routing: Routing) -> float:
    """Share of the busiest rank over the mean, from popularity alone."""
    order = np.arange(len(routing.chances))
    turn = order // routing.ranks
    place = order % routing.ranks
    rank = np.where(turn % 2, routing.ranks - 1 - place, place)
    load = np.bincount(rank, weights=routing.chances, minlength=routing.ranks)
    return float(load.max() / load.mean())

"""Which experts a step touches, and how unevenly their work falls on the ranks that hold them."""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from statistics import NormalDist

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
    of the expert whose copies have most to do, which they share (DeepSeek's EPLB, replicate_experts). A token's experts
    are in groups_per_token of `groups` equal groups, which ranks hold one after another.
    """

    num_experts: int
    experts_per_token: int
    ranks: int = 1
    skew: float = 0.0
    redundant: int = 0
    groups: int = 1
    groups_per_token: int = 1

    @classmethod
    def of(cls, moe: MoE, parallelism: Parallelism) -> "Routing":
        ranks, skew, redundant = parallelism.expert, parallelism.expert_skew, parallelism.num_redundant_experts
        groups = moe.num_groups, moe.groups_per_token
        return cls(moe.num_experts, moe.num_experts_per_token, ranks, skew, redundant, *groups)

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
        Chance: the largest of the ranks' counts, each the sum of what its tokens have there.
        """
        mean = np.maximum(np.asarray(tokens, dtype=float) * self.experts_per_token / self.ranks, 1e-9)
        spread = np.sqrt(_variance(self) * self.experts_per_token / self.ranks / mean)
        return np.minimum(_popular(self) * (1.0 + _largest(self.ranks) * spread), float(self.ranks))

    def most_touched(self, tokens) -> np.ndarray:
        """Expected experts that are touched on the rank where most are: each of a rank's own is, or not."""
        touched, alone = self.touched(tokens), replace(self, groups=1, groups_per_token=1)
        spread = np.sqrt(touched * (1.0 - np.minimum(touched / self.held, 1.0)))
        if self.ranks > 1:  # groups bring a rank many tokens or few
            spread = spread * np.sqrt(_variance(self) / _variance(alone))
        most = np.maximum(_popular(self) * (touched + _largest(self.ranks) * spread), np.minimum(tokens, 1.0))
        return np.minimum(most, self.held)

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
def _variance(routing: Routing) -> float:
    """Of the number of a token's experts that one rank holds, over the square of its mean.

    By pairs of the rank's experts: both are chosen if their groups are, and they two among the groups' experts.
    """
    n, k, groups, chosen = routing.num_experts, routing.experts_per_token, routing.groups, routing.groups_per_token
    held, within = n / routing.ranks, n * chosen / groups
    near = held * (min(held, n / groups) - 1.0)
    both = k * (k - 1.0) / max(within * (within - 1.0), 1.0) * chosen / groups
    far = (held * (held - 1.0) - near) * (chosen - 1.0) / max(groups - 1.0, 1.0)
    mean = k / routing.ranks
    return max((mean + both * (near + far)) / mean**2 - 1.0, 1e-12)


@cache
def _largest(count: int) -> float:
    """The largest of so many standard normal numbers, expected (Blom 1958, to 2 % from 4 on)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


@lru_cache(maxsize=64)
def _popular(routing: Routing) -> float:
    """Share of the busiest rank over the mean, from popularity alone."""
    order = np.arange(len(routing.chances))
    turn = order // routing.ranks
    place = order % routing.ranks
    rank = np.where(turn % 2, routing.ranks - 1 - place, place)
    load = np.bincount(rank, weights=routing.chances, minlength=routing.ranks)
    return float(load.max() / load.mean())

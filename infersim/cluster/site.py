"""What the cluster knows of a replica beside its engine, and which replicas a request may go to."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..config.errors import InputError
from ..config.units import short
from ..workload.requests import Requests


@dataclass(frozen=True)
class Site:
    """What the cluster needs to know of one replica beside its engine."""

    weight: float
    """of router weighted-random"""
    block_bytes: float
    """of one KV block, on all its GPUs"""
    num_layers: int
    weights_bytes: float
    """on one GPU: what it loads when it starts"""
    model: str | None = ""
    """what requests call the model that it serves; None: it encodes images"""
    adapters: Mapping[str, float] = field(default_factory=dict)
    """bytes on one GPU of each LoRA adapter that it can load"""
    max_loras: int = 0
    """adapters that it has room for"""
    overlap_loading: bool = True
    """whether steps go on while it loads one"""
    host_bandwidth: float = np.inf
    """B/s, from the host's memory to each GPU"""
    embedding_bytes: float = 0.0
    """of one prompt token that comes from an encoder"""


def pools_of(requests: Requests, sites: list[Site]) -> np.ndarray:
    """i8[n]: which model each request is for, or whose adapter, of the sites' in their order.

    InputError for a name that no replica serves.
    """
    if not requests.models:
        return np.zeros(len(requests), "i8")
    places: dict[str, int] = {}
    for model in (site.model for site in sites if site.model is not None):
        places.setdefault(model, len(places))
    for site in sites:
        if site.model is not None:
            places |= dict.fromkeys(site.adapters, places[site.model])
    for name in requests.models:
        if name not in places:
            raise InputError(f"workload: no replica serves model {short(name)}; served are {', '.join(places)}")
    return np.array([places[name] for name in requests.models])[requests.model]


def adapters_of(requests: Requests, sites: list[Site]) -> list[str] | None:
    """The adapter that each request is for, "" for none; None if no request is for any."""
    known = {name for site in sites for name in site.adapters}
    names = [name if name in known else "" for name in requests.models]
    return [names[m] for m in requests.model.tolist()] if requests.model is not None and any(names) else None

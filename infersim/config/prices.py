"""What accelerators cost: quotes of one kind, or the user's own prices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .base import Description
from .hardware import Hardware
from .resources import load_yaml, packaged
from .units import UsdPerHour

PriceKind = Literal["on-demand", "reserved", "spot", "ownership"]


class Quote(Description):
    """A price that somebody published: USD per accelerator and hour, from the lowest to the highest offer."""

    kind: PriceKind
    usd: Annotated[
        tuple[UsdPerHour, UsdPerHour], BeforeValidator(lambda v: v if isinstance(v, list | tuple) else (v, v))
    ]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d$")]
    source: str


class Quotes(Description):
    """prices.yaml, by profile; of a kind the first counts."""

    quotes: dict[str, list[Quote]]
    not_priced: list[str]


class Prices(Description):
    """What accelerators cost. Prices of one kind only: those of two are not comparable."""

    kind: PriceKind = "on-demand"
    """rented by the hour, reserved for years, spot, or bought and run; quotes: `infersim show hardware`"""
    usd_per_hour: dict[str, UsdPerHour] = Field(default_factory=dict)
    """device -> your own price of one, instead of a quote"""


@dataclass(frozen=True)
class Price:
    """USD per hour of one accelerator, [low, high], and who says so."""

    low: float
    high: float
    source: str

    @property
    def middle(self) -> float:
        """What a search counts."""
        return (self.low + self.high) / 2


def price_of(device: str, prices: Prices) -> Price | None:
    """None if nobody quotes this kind of price for the device."""
    if (own := prices.usd_per_hour.get(device)) is not None:
        return Price(own, own, "your own")
    quote = next((quote for quote in quotes().get(device, ()) if quote.kind == prices.kind), None)
    return Price(*quote.usd, f"{quote.kind}, {quote.source}, {quote.date}") if quote else None


def hourly(gpus: Sequence[tuple[Hardware, float]], prices: Prices) -> list[float] | None:
    """What so many accelerators cost, [low, high]; None if a price is not known."""
    known = [(price, count) for hardware, count in gpus if (price := price_of(hardware.name, prices))]
    if len(known) < len(gpus):
        return None
    return [sum(price.low * n for price, n in known), sum(price.high * n for price, n in known)]


@cache
def quotes() -> dict[str, list[Quote]]:
    """Every quote, by profile; none for those that are not priced."""
    path = packaged("hardware_profiles") / "published" / "prices.yaml"
    found = Quotes.validate(load_yaml(path), str(path))
    return found.quotes | {device: [] for device in found.not_priced}

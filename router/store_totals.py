"""Some of what the request store holds for a cell, for views of it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """A router's: seconds until it runs out, negative when it has; where other routers reach it ("" when it has not said)."""

    left_s: float
    address: str


@dataclass(frozen=True, slots=True)
class StoreTotals:
    """Some of what the store holds, for views: units by budget label, leases by router."""

    reserved: Mapping[str, int]
    routers: Mapping[str, Lease]

"""A recount of everything the store holds for a cell: for the admin check and for tests. It reads all of the cell's keys."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lifecycle.states import TERMINAL, State
from router.redis_link import Keys, RedisLink
from router.store import StoreBooks
from router.store_totals import Lease, StoreTotals

#: Others go on writing while the books are read, so what looks wrong is looked at again: that often, with that pause in seconds.
LOOKS = 3
PAUSE_S = 0.05
#: Records that one call looks at.
OUTLINES = 500

_ENDED = frozenset(state.value for state in TERMINAL)


async def read_books(link: RedisLink, keys: Keys) -> StoreBooks:
    """See `Store.books`. A fault is reported when it was there at every look."""
    books = await _look(link, keys)
    faults = set(books.faults)
    for _ in range(LOOKS - 1):
        if not faults:
            break
        await asyncio.sleep(PAUSE_S)
        books = await _look(link, keys)
        faults &= set(books.faults)
    return StoreBooks(books.live_requests, books.tombstones, books.reserved, books.routers, tuple(sorted(faults)))


async def read_totals(link: RedisLink, keys: Keys, labels: Sequence[str]) -> StoreTotals:
    """See `Store.totals`."""
    found: Any = await link.run("totals", [keys.reserved, keys.leases, keys.addresses], list(labels))
    now, units, leases, addresses = found
    where = _pairs(addresses)
    return StoreTotals(
        reserved=dict(zip(labels, map(int, units), strict=True)),
        routers={router: Lease(float(end) - float(now), where.get(router, "")) for router, end in _pairs(leases).items()},
    )


async def _look(link: RedisLink, keys: Keys) -> StoreBooks:
    found: Any = await link.run("overview", [keys.reserved, keys.leases, keys.tombstones], [])
    now, reserved, leases, tombstones = found
    ends = _pairs(leases)
    totals, holds = _split(_pairs(reserved))
    owned = await _owned(link, keys, list(ends))
    records = await _records(link, keys, list(owned.keys() | holds.keys()))
    faults = [*_sum_faults(totals, holds), *_hold_faults(holds, records), *_owner_faults(owned, records)]
    return StoreBooks(
        live_requests=len(owned),
        tombstones=int(tombstones),
        reserved=totals,
        routers={router: float(end) - float(now) for router, end in ends.items()},
        faults=tuple(faults),
    )


def _pairs(flat: Sequence[str]) -> dict[str, str]:
    """A hash, or a sorted set with its scores, out of a script's flat list."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def _owned(link: RedisLink, keys: Keys, routers: list[str]) -> dict[str, str]:
    owned: dict[str, str] = {}
    for router in routers:
        members = await link.command("books", "SMEMBERS", keys.owned(router))
        owned.update(dict.fromkeys(members, router))
    return owned


async def _records(link: RedisLink, keys: Keys, ids: list[str]) -> dict[str, dict[str, str | None]]:
    """Owner, state and holds of each id; values are None where there is no record."""
    records: dict[str, dict[str, str | None]] = {}
    for begin in range(0, len(ids), OUTLINES):
        some = ids[begin : begin + OUTLINES]
        rows: Any = await link.run("outlines", [keys.record(request_id) for request_id in some], [])
        for request_id, row in zip(some, rows, strict=True):
            records[request_id] = dict(zip(("router", "state", "holds"), row, strict=True))
    return records


def _split(reserved: Mapping[str, str]) -> tuple[dict[str, int], dict[str, dict[tuple[str, int], int]]]:
    """Totals by label; units by (label, attempt) by request id."""
    totals: dict[str, int] = {}
    holds: dict[str, dict[tuple[str, int], int]] = {}
    for name, units in reserved.items():
        kind, _, rest = name.partition("\x1f")
        if kind == "t":
            totals[rest] = int(units)
            continue
        request_id, attempt, label = rest.split("\x1f", 2)
        holds.setdefault(request_id, {})[label, int(attempt)] = int(units)
    return totals, holds


def _sum_faults(totals: Mapping[str, int], holds: Mapping[str, Mapping[tuple[str, int], int]]) -> list[str]:
    sums: dict[str, int] = {}
    for held in holds.values():
        for (label, _), units in held.items():
            sums[label] = sums.get(label, 0) + units
    return [
        f"budget {label}: total is {totals.get(label, 0)}, reservations add up to {sums.get(label, 0)}"
        for label in sorted(totals.keys() | sums.keys())
        if totals.get(label, 0) != sums.get(label, 0)
    ]


def _hold_faults(
    holds: Mapping[str, Mapping[tuple[str, int], int]], records: Mapping[str, Mapping[str, str | None]]
) -> list[str]:
    faults = []
    for request_id, record in records.items():
        state, listed = record["state"], json.loads(record["holds"] or "[]")
        written = {(label, attempt) for label, attempt in listed}
        found = set(holds.get(request_id, {}))
        if found and (state is None or state in _ENDED):
            faults.append(f"request {request_id!r} is {state or 'unknown'} and holds {sorted(found)}")
        elif found != written:
            faults.append(f"request {request_id!r} holds {sorted(found)}, its record says {sorted(written)}")
    return faults


def _owner_faults(owned: Mapping[str, str], records: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    faults = []
    for request_id, router in owned.items():
        record = records[request_id]
        if record["router"] != router:
            faults.append(f"request {request_id!r} is listed for {router!r}, its record says {record['router']!r}")
        elif record["state"] in _ENDED:
            faults.append(f"request {request_id!r} has ended as {State(record['state']).value} and is listed as live")
    return faults

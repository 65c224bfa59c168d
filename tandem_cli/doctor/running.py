"""The checks of a running cell."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from tandem_cli.cell_file import CellFile, find_cell
from tandem_cli.doctor import cell, cell_judged, told_judged
from tandem_cli.doctor.finding import Finding, skipped
from tandem_cli.doctor.here import read_store


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are, as host:port; redis_url may be empty. routers_known: how many run, None when nobody knows."""

    routers: tuple[str, ...]
    members: tuple[str, ...]
    metrics: tuple[str, ...]
    redis_url: str
    cell: str
    routers_known: int | None = None


def completed(places: Places) -> Places:
    """What was not named is taken from a cell that `tandem up` runs on this machine."""
    found: CellFile | None = next((one for one in map(find_cell, places.routers) if one is not None), None)
    if found is None:
        return places
    members = tuple(one.address for kind in ("prefill", "decode") for one in found.of_kind(kind))
    routers = tuple(one.address for one in found.of_kind("router"))
    return Places(
        tuple(dict.fromkeys([*places.routers, *(routers if len(routers) > 1 else ())])),
        places.members or members,
        places.metrics or tuple(found.metrics()),
        places.redis_url or found.store,
        places.cell,
        len(routers),
    )


def check_processes(places: Places) -> Iterator[Finding]:
    """Routers and members, and whether they fit one another."""
    routers, members = asyncio.run(cell.see_all(places.routers, places.members))
    yield from cell_judged.judge_routers(routers)
    if not members:
        yield skipped("members", "none is named", "--member host:port, for each, to look at them too")
    yield from cell_judged.judge_members(members)
    yield from cell_judged.judge_agreement(routers, members)


def check_metrics(places: Places) -> Iterator[Finding]:
    """Versions and clocks."""
    if not places.metrics:
        yield skipped("versions", "no metrics are named", "--metrics host:port,… to compare versions and clocks")
        return
    yield from cell_judged.judge_processes([cell.see_process(address) for address in places.metrics])


def check_store(places: Places) -> Iterator[Finding]:
    """The store and the routers' leases in it."""
    if not places.redis_url:
        yield skipped("store", "none is named", "--redis-url, to look at leases and at the store itself")
        return
    found = read_store(places.redis_url, places.cell)
    yield from told_judged.judge_store(found)
    if not found.problem:
        yield told_judged.judge_leases(found, places.routers_known)


def check_request(places: Places, model: str) -> Iterator[Finding]:
    """One token, all the way, from each router."""
    for router in places.routers:
        yield from cell_judged.judge_answer(asyncio.run(cell.answer_once(router, model)))

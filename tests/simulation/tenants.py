"""Tenants of a world: whose requests they are, what each tenant may have, and whether that was kept."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from router.redis_link import Keys
from tests.simulation.cell import Cell, Shape
from tests.simulation.client_plans import ClientPlan

NAMES = ("amber", "basalt", "cobalt")
#: Of all worlds so many have tenants.
SHARE = 0.3
#: Metadata of a call.
KEY = "tandem-tenant"
CONCURRENCY = "TENANT_CONCURRENCY"


def shared(rng: random.Random, shape: Shape, clients: tuple[ClientPlan, ...]) -> tuple[Shape, tuple[ClientPlan, ...]]:
    """In some worlds requests are of two or three tenants, who may have little more than the largest request needs."""
    if rng.random() >= SHARE:
        return shape, clients
    names = NAMES[: rng.choice((2, 3))]
    limits = {
        "trust_tenant_header": True,
        "tenant_pages": max(pages_of(client, shape.page_tokens) for client in clients) + rng.choice((0, 2, 20)),
        "tenant_tokens": rng.choice((None, max(len(client.prompt) for client in clients) + rng.choice((0, 5, 40)))),
        "tenant_concurrent_requests": rng.choice((None, 1, 3)),
        "queue_tenant_requests": rng.choice((1, 2, 1024)),
    }
    shape = replace(shape, router={**shape.router, **limits})
    return shape, tuple(replace(client, tenant=rng.choice(names)) for client in clients)


def pages_of(client: ClientPlan, size: int) -> int:
    """Pages of `size` tokens that all outputs of a request need together."""
    pages = -(-(len(client.prompt) + client.max_output_tokens) // size)
    return pages + (client.best_of - 1) * (pages - len(client.prompt) // size)


def metadata_of(client: ClientPlan) -> tuple[tuple[str, str], ...]:
    """What a client says with each call."""
    return ((KEY, client.tenant),) if client.tenant else ()


def may_be_refused(client: ClientPlan, clients: Sequence[ClientPlan], shape: Shape, reason: str) -> bool:
    """Whether its tenant had so many requests that a limit of its own can have been met."""
    of_tenant = sum(other.tenant == client.tenant for other in clients)
    limit = {CONCURRENCY: "tenant_concurrent_requests", "TENANT_QUEUE_FULL": "queue_tenant_requests"}.get(reason)
    most = shape.router.get(limit) if limit else None
    return most is not None and of_tenant > most


def over_budget(cell: Cell) -> Iterator[str]:
    """Tenants that hold more of the store's budgets than they may. Sentences."""
    router = cell.shape.router
    limits = {"pages": router.get("tenant_pages"), "tokens": router.get("tenant_tokens")}
    held: Counter[str] = Counter()
    for name, units in cell.store.hash_of(Keys("default").reserved).items():
        kind, _, label = name.partition("\x1f")
        if kind == "t":
            held[label] += int(units)
    for label, units in held.items():
        resource, scope, tenant = label.split(":", 2)
        limit = limits.get(resource) if scope == "tenant" else None
        if limit is not None and units > limit:
            yield f"tenant {tenant} holds {units} {resource} in the store, its limit is {limit}"

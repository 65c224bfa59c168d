"""What one tenant may ask of this router: requests and tokens a second, requests at a time. Pure: time comes in.

Each router counts for itself: behind several of them a tenant may ask so many times as much.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from router.token_bucket import TokenBucket

#: Most tenants that are counted at a time. One that runs nothing and owes nothing is not counted; beyond this the one that was
#: seen longest ago is forgotten.
TENANTS_MAX = 10_000
#: Without a burst of its own a bucket holds what comes in so many seconds.
BURST_S = 10.0


@dataclass(frozen=True, slots=True)
class TenantRates:
    """Limits of one tenant; None is no limit. Tokens are those of prompts and those that were chosen.

    A burst is what may come at once after a pause; None: what comes in BURST_S.
    """

    requests_per_s: float | None = None
    request_burst: float | None = None
    tokens_per_s: float | None = None
    token_burst: float | None = None
    concurrent_requests: int | None = None


class Limit(Enum):
    """Which limit was met."""

    REQUEST_RATE = "tenant_requests_per_s"
    TOKEN_RATE = "tenant_tokens_per_s"
    CONCURRENCY = "tenant_concurrent_requests"


class OverLimit(Exception):
    """A tenant asks for more than it may. `bound`: the limit; `wait_s`: until it may ask again, None: not known."""

    def __init__(self, limit: Limit, bound: float, wait_s: float | None) -> None:
        super().__init__(f"{limit.value} is {bound:g}")
        self.limit = limit
        self.bound = bound
        self.wait_s = wait_s


@dataclass(slots=True)
class _Tenant:
    rates: TenantRates
    requests: TokenBucket | None
    tokens: TokenBucket | None
    running: int = 0

    def idle(self, now: float) -> bool:
        buckets = (self.requests, self.tokens)
        return not self.running and all(bucket is None or bucket.is_full(now) for bucket in buckets)


@dataclass(slots=True)
class TenantLimits:
    """See the module. `rates_of`: the limits of a tenant as they are now; a change counts from the tenant's next request on."""

    rates_of: Callable[[str], TenantRates] = field(default=lambda tenant: TenantRates())
    most: int = TENANTS_MAX
    _tenants: dict[str, _Tenant] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def running_requests(self) -> int:
        """Requests of all tenants that run here."""
        return sum(one.running for one in self._tenants.values())

    def running(self, tenant: str) -> int:
        """Requests of a tenant that run here."""
        found = self._tenants.get(tenant)
        return found.running if found is not None else 0

    def knock(self, tenant: str, now: float) -> None:
        """A request comes, good or not: it counts. Raises OverLimit, and then it does not count."""
        one = self._seen(tenant, now)
        if one.requests is None:
            return
        wait_s = one.requests.wait_s(1.0, now)
        if wait_s > 0:
            raise OverLimit(Limit.REQUEST_RATE, one.requests.per_s, wait_s)
        one.requests.take(1.0, now)

    def check(self, tenant: str, prompt_tokens: int, now: float) -> None:
        """Whether a request with so many tokens may begin. Raises OverLimit."""
        one = self._seen(tenant, now)
        most = one.rates.concurrent_requests
        if most is not None and one.running >= most:
            raise OverLimit(Limit.CONCURRENCY, most, None)
        if one.tokens is not None:
            wait_s = one.tokens.wait_s(prompt_tokens, now)
            if wait_s > 0:
                raise OverLimit(Limit.TOKEN_RATE, one.tokens.per_s, wait_s)

    def began(self, tenant: str, prompt_tokens: int, now: float) -> None:
        """A request runs; `ended` is called once for it."""
        one = self._seen(tenant, now)
        one.running += 1
        if one.tokens is not None:
            one.tokens.take(prompt_tokens, now)

    def ended(self, tenant: str, chosen_tokens: int, now: float) -> None:
        """It does not run any more, and chose so many tokens."""
        one = self._tenants[tenant]
        one.running -= 1
        if one.tokens is not None:
            one.tokens.take(chosen_tokens, now)
        if one.idle(now):
            del self._tenants[tenant]

    def _seen(self, tenant: str, now: float) -> _Tenant:
        rates = self.rates_of(tenant)
        one = self._tenants.pop(tenant, None)
        if one is None:
            self._make_room(now)
            one = _Tenant(rates, _bucket(rates.requests_per_s, rates.request_burst, now), _tokens(rates, now))
        elif one.rates != rates:
            one.requests = _bucket(rates.requests_per_s, rates.request_burst, now)
            one.rates, one.tokens = rates, _tokens(rates, now)
        self._tenants[tenant] = one  # last, as the one seen most recently
        return one

    def _make_room(self, now: float) -> None:
        if len(self._tenants) < self.most:
            return
        idle = [tenant for tenant, one in self._tenants.items() if one.idle(now)]
        if not idle:
            idle = [tenant for tenant, one in self._tenants.items() if not one.running][:1]
        for tenant in idle:
            del self._tenants[tenant]


def _tokens(rates: TenantRates, now: float) -> TokenBucket | None:
    return _bucket(rates.tokens_per_s, rates.token_burst, now)


def _bucket(per_s: float | None, burst: float | None, now: float) -> TokenBucket | None:
    if per_s is None:
        return None
    return TokenBucket.full(per_s, burst if burst is not None else max(1.0, per_s * BURST_S), now)

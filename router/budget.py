"""How much of the pools a request may hold: budgets as values, estimates, and the tickets of this router. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from lifecycle.record import AttemptKey


class Resource(Enum):
    """What a budget counts."""

    TOKENS = "tokens"
    """Prompt tokens waiting or being computed: held from admission until the hand-over has committed."""
    PAGES = "pages"
    """KV pages of the decode pool: held from admission until the end."""


class Scope(Enum):
    """Whom a budget limits."""

    MEMBER = "member"
    TENANT = "tenant"
    TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Budget:
    """Names one budget. `name` is the member or the tenant; empty for the total."""

    resource: Resource
    scope: Scope
    name: str = ""

    @property
    def label(self) -> str:
        """Its name in keys, messages and quota violations, such as "pages:member:decode-0"."""
        return f"{self.resource.value}:{self.scope.value}:{self.name}"


@dataclass(frozen=True, slots=True)
class Claim:
    """An amount wanted of a budget that may hold at most `limit`, both in the budget's unit."""

    budget: Budget
    amount: int
    limit: int

    def __post_init__(self) -> None:
        if self.amount < 0 or self.limit < 0:
            raise ValueError(f"claim on {self.budget.label}: amount {self.amount} and limit {self.limit} must be 0 or more")


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a claim was refused: of `limit` units `taken` are held and `wanted` more were asked for."""

    budget: Budget
    wanted: int
    taken: int
    limit: int

    @property
    def never_fits(self) -> bool:
        """Whether even an idle pool could not carry it."""
        return self.wanted > self.limit

    def __str__(self) -> str:
        return f"{self.budget.label}: {self.wanted} wanted, {self.taken} of {self.limit} taken"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one attempt needs. `prefill_tokens` is 0 when the decode member computes the prompt itself."""

    prefill_tokens: int
    pages: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a router sets beside the members' own capacity. None is no limit."""

    tenant_tokens: int | None = None
    tenant_pages: int | None = None
    total_tokens: int | None = None
    total_pages: int | None = None


#: The limits for a tenant, as they are now.
LimitsOf = Callable[[str], Limits]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the pools offer a single request at best: the largest member of each kind counts.

    `member_tokens` is None when no member computes prompts for others, so nothing limits it. `page_tokens` is 0 while no decode
    member is known: then nobody can say how many pages a request needs. `sequence_pages`: as in MemberInfo.
    """

    context_tokens: int
    page_tokens: int
    member_pages: int
    member_tokens: int | None = None
    sequence_pages: int = 0

    @property
    def most_tokens(self) -> int:
        """Most tokens of prompt and output that an idle member holds."""
        if not self.page_tokens or 0 < self.sequence_pages <= self.member_pages:
            return self.context_tokens
        return min(self.context_tokens, self.member_pages * self.page_tokens)

    def most_tokens_of(self, prompt_tokens: int, outputs: int) -> int:
        """The same for each of several outputs of one prompt, which share its full pages."""
        if outputs == 1 or not self.page_tokens:
            return self.most_tokens
        if self.sequence_pages:
            return self.context_tokens if outputs * self.sequence_pages <= self.member_pages else self.most_tokens // outputs
        return min(self.context_tokens, longest(self.member_pages, prompt_tokens, self.page_tokens, outputs))


@dataclass(frozen=True, slots=True)
class NeverFits:
    """A request that no idle cell could carry: the field to blame, its value and the greatest value that would do."""

    field: str
    value: int
    limit: int
    sentence: str


def estimate(
    prompt_tokens: int,
    max_output_tokens: int,
    page_tokens: int,
    *,
    expected_output_tokens: int = 0,
    sequence_pages: int = 0,
    outputs: int = 1,
) -> Demand:
    """Prefill tokens and decode pages of a prompt's outputs: pages for the prompt once, and for all of max_output_tokens of each.

    `expected_output_tokens`: what decode members promise at most beside the prompt; 0: they promise all. `sequence_pages`: as in
    MemberInfo.
    """
    if prompt_tokens < 1 or max_output_tokens < 1 or page_tokens < 1:
        raise ValueError("prompt_tokens, max_output_tokens and page_tokens must be at least 1")
    output_tokens = min(max_output_tokens, expected_output_tokens or max_output_tokens)
    pages = math.ceil((prompt_tokens + output_tokens) / page_tokens)
    if sequence_pages:  # behind a window nothing is shared
        return Demand(prefill_tokens=prompt_tokens, pages=outputs * min(pages, sequence_pages))
    return Demand(prefill_tokens=prompt_tokens, pages=pages + (outputs - 1) * (pages - prompt_tokens // page_tokens))


def longest(pages: int, prompt_tokens: int, page_tokens: int, outputs: int) -> int:
    """Tokens of prompt and output for each of several outputs that so many pages hold."""
    shared = prompt_tokens // page_tokens
    return (pages + (outputs - 1) * shared) // outputs * page_tokens


def never_fits(
    prompt_tokens: int, max_output_tokens: int, capacity: Capacity, limits: Limits, outputs: int = 1
) -> NeverFits | None:
    """Whether an idle cell would refuse this for ever, with the field and the true limit; None when it can run."""
    if prompt_tokens + max_output_tokens > capacity.context_tokens:
        room = max(0, capacity.context_tokens - max_output_tokens)
        return NeverFits(
            "prompt",
            prompt_tokens,
            room,
            f"prompt ({prompt_tokens} tokens) and max_output_tokens ({max_output_tokens}) exceed the context of "
            f"{capacity.context_tokens} tokens",
        )
    token_limits = (("a prefill member", capacity.member_tokens), *_router_limits(limits, Resource.TOKENS))
    for owner, limit in token_limits:
        if limit is not None and prompt_tokens > limit:
            return NeverFits(
                "prompt", prompt_tokens, limit, f"prompt has {prompt_tokens} tokens; {owner} takes at most {limit} at once"
            )
    size, window = capacity.page_tokens, capacity.sequence_pages
    if not size:
        return None
    pages = estimate(prompt_tokens, max_output_tokens, size, sequence_pages=window, outputs=outputs).pages
    each = "" if outputs == 1 else f" for each of {outputs} choices"
    for owner, limit in (("a decode member", capacity.member_pages), *_router_limits(limits, Resource.PAGES)):
        if limit is not None and pages > limit:
            return NeverFits(
                "max_output_tokens",
                max_output_tokens,
                max(0, longest(limit, prompt_tokens, size, outputs) - prompt_tokens),
                f"prompt ({prompt_tokens} tokens) and max_output_tokens ({max_output_tokens}){each} need {pages} KV pages of "
                f"{capacity.page_tokens} tokens; {owner} has {limit}",
            )
    return None


def _router_limits(limits: Limits, resource: Resource) -> tuple[tuple[str, int | None], ...]:
    if resource is Resource.TOKENS:
        return (("a tenant", limits.tenant_tokens), ("the cell", limits.total_tokens))
    return (("a tenant", limits.tenant_pages), ("the cell", limits.total_pages))


@dataclass(frozen=True, slots=True)
class Seats:
    """Where an attempt would run, with each member's capacity: the arguments of `claims`."""

    tenant: str
    decode_member: str
    decode_pages: int
    prefill_member: str = ""
    prefill_tokens: int = 0


def claims(demand: Demand, seats: Seats, limits: Limits) -> tuple[Claim, ...]:
    """Everything an attempt must hold to run there. Without a prefill member nothing is claimed of prefill tokens.

    A prompt with what an earlier attempt chose may have more tokens than a budget: it then takes all of it.
    """
    wanted = [Claim(Budget(Resource.PAGES, Scope.MEMBER, seats.decode_member), demand.pages, seats.decode_pages)]
    optional = [
        (Budget(Resource.PAGES, Scope.TENANT, seats.tenant), demand.pages, limits.tenant_pages),
        (Budget(Resource.PAGES, Scope.TOTAL), demand.pages, limits.total_pages),
    ]
    if seats.prefill_member:
        tokens = demand.prefill_tokens
        member = Budget(Resource.TOKENS, Scope.MEMBER, seats.prefill_member)
        wanted.append(Claim(member, min(tokens, seats.prefill_tokens), seats.prefill_tokens))
        optional.append((Budget(Resource.TOKENS, Scope.TENANT, seats.tenant), tokens, limits.tenant_tokens))
        optional.append((Budget(Resource.TOKENS, Scope.TOTAL), tokens, limits.total_tokens))
    for budget, amount, limit in optional:
        if limit is not None:
            most = limit if budget.resource is Resource.TOKENS else amount
            wanted.append(Claim(budget, min(amount, most), limit))
    return tuple(wanted)


class OverBudget(Exception):
    """A claim that does not fit now. Nothing was taken."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(str(shortage))
        self.shortage = shortage


@dataclass(frozen=True, slots=True)
class Ticket:
    """Budget that this router holds for one admitted attempt. `number` is never used twice."""

    key: AttemptKey
    claims: tuple[Claim, ...]
    number: int


@dataclass(frozen=True, slots=True)
class BudgetStatistics:
    """Totals since the start, and what is held now by budget label."""

    open_tickets: int
    acquired: int
    released: int
    late_releases: int
    refused: Mapping[str, int]
    held: Mapping[str, int]


class BudgetBook:
    """The tickets of one router: a quick first answer before the store is asked, and the count that must return to zero.

    The store decides across routers; this book never admits more than the limits on its own account.
    """

    def __init__(self) -> None:
        self._tickets: dict[AttemptKey, Ticket] = {}
        self._held: dict[Budget, int] = {}
        self._acquired = 0
        self._released = 0
        self._late_releases = 0
        self._refused: dict[str, int] = {}

    def held(self, budget: Budget) -> int:
        """Units of `budget` held by this router's tickets."""
        return self._held.get(budget, 0)

    def shortage(self, wanted: Iterable[Claim]) -> Shortage | None:
        """The first claim that does not fit beside what is held, None when all fit."""
        for claim in wanted:
            taken = self.held(claim.budget)
            if taken + claim.amount > claim.limit:
                return Shortage(claim.budget, claim.amount, taken, claim.limit)
        return None

    def acquire(self, key: AttemptKey, wanted: Sequence[Claim]) -> Ticket:
        """Take all claims or none. Raises OverBudget with what is short, ValueError for a key that has a ticket."""
        if key in self._tickets:
            raise ValueError(f"request {key.request_id!r} attempt {key.attempt} already holds a ticket")
        if len({claim.budget for claim in wanted}) != len(wanted):
            raise ValueError("claims of one ticket must name each budget once")
        short = self.shortage(wanted)
        if short is not None:
            label = f"{short.budget.resource.value}:{short.budget.scope.value}"
            self._refused[label] = self._refused.get(label, 0) + 1
            raise OverBudget(short)
        self._acquired += 1
        ticket = Ticket(key, tuple(claim for claim in wanted if claim.amount), number=self._acquired)
        self._tickets[key] = ticket
        for claim in ticket.claims:
            self._held[claim.budget] = self.held(claim.budget) + claim.amount
        return ticket

    def release(self, ticket: Ticket) -> bool:
        """Give back what is left of a ticket; True the first time. A second release changes nothing and is counted in
        `late_releases`: clean-up paths may meet (cancel, loss of a member, end), and none should fail for coming second."""
        held = self._open(ticket)
        if held is None:
            self._late_releases += 1
            return False
        del self._tickets[ticket.key]
        self._give_back(held.claims)
        self._released += 1
        return True

    def release_tokens(self, ticket: Ticket) -> Ticket:
        """The hand-over has committed: give back the prompt tokens, keep the pages until `release`. Returns the ticket as it
        is then; one that is no longer open, or holds no tokens any more, is left alone. `release` takes either."""
        held = self._open(ticket)
        if held is None:
            return ticket
        given = tuple(claim for claim in held.claims if claim.budget.resource is Resource.TOKENS)
        left = replace(held, claims=tuple(claim for claim in held.claims if claim.budget.resource is not Resource.TOKENS))
        self._tickets[ticket.key] = left
        self._give_back(given)
        return left

    def _open(self, ticket: Ticket) -> Ticket | None:
        """What the ticket holds now; None when it was given back."""
        held = self._tickets.get(ticket.key)
        return held if held is not None and held.number == ticket.number else None

    def _give_back(self, given: Iterable[Claim]) -> None:
        for claim in given:
            left = self._held[claim.budget] - claim.amount
            if left:
                self._held[claim.budget] = left
            else:
                del self._held[claim.budget]

    def statistics(self) -> BudgetStatistics:
        """Counts for metrics and the admin check."""
        return BudgetStatistics(
            open_tickets=len(self._tickets),
            acquired=self._acquired,
            released=self._released,
            late_releases=self._late_releases,
            refused=dict(self._refused),
            held={budget.label: units for budget, units in self._held.items()},
        )

    def check(self) -> list[str]:
        """Recount from the tickets; sentences about what does not add up, empty when all does."""
        recount: dict[Budget, int] = {}
        for ticket in self._tickets.values():
            for claim in ticket.claims:
                recount[claim.budget] = recount.get(claim.budget, 0) + claim.amount
        faults = [
            f"{budget.label}: {self.held(budget)} held, the tickets add up to {recount.get(budget, 0)}"
            for budget in self._held.keys() | recount.keys()
            if self.held(budget) != recount.get(budget, 0)
        ]
        if self._acquired - self._released != len(self._tickets):
            faults.append(f"{self._acquired} tickets acquired, {self._released} released, {len(self._tickets)} open")
        return faults

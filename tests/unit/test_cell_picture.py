"""What a view of the cell is made of."""

from lifecycle.deadlines import Limits as ClockLimits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.pages_by_state import PagesByState
from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router.budget import Limits
from router.cell_messages import cell_message
from router.cell_picture import Known, KnownMember, KnownRequest, live_request, picture
from router.cell_view import MemberState, Stage
from router.member_facts import MemberInfo, MemberLoad, Role
from router.prefill_call import PrefillDone
from router.progress import Progress
from router.queue import QueueLimits, Waiting, WaitingQueue
from router.rates import Rate, Rates
from router.recent_ends import RecentEnds
from router.request import Delivery, Sampling, ServedModel, Stop, Utf8Policy, ValidatedRequest
from router.seat import Committed
from router.store_totals import Lease, StoreTotals
from tandem.v1 import cell_pb2 as pb

MODEL = ServedModel("m", "snap", 512, 300)
NOW, WALL = 100.0, 5000.0


def member(name: str, role: Role, load: MemberLoad | None = None, **changes: object) -> KnownMember:
    info = MemberInfo(name, f"{name}-1", f"{name}:1", role, "snap", 16, 1000, 512, 8, 4000, computes_prompts=False)
    return KnownMember(**{"role": role, "address": f"{name}:1", "info": info, "load": load or MemberLoad(), **changes})


def record(request_id: str = "r", *events: Event, tenant: str = "t") -> RequestRecord:
    made = RequestRecord(request_id, tenant, "m", "snap", "f", 0, "router@1", "", WALL - 9)
    for number, event in enumerate(events):
        made.advance(event, WALL - 8 + number)
    return made


def known_request(made: RequestRecord, progress: Progress | None = None, **changes: object) -> KnownRequest:
    request = ValidatedRequest(
        *(made.request_id, made.tenant, "f", MODEL, tuple(range(40))),
        *(Sampling(1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 1), Stop((), (), False, False, 0), 8, Delivery()),
        *(Utf8Policy.UNSET, 0, ClockLimits()),
    )
    values = {"readers": 1, "unsent_bytes": 0, "send_s": 0.0, "paused": False, **changes}
    return KnownRequest(request, made, progress or Progress(40, NOW - 9), **values)


def known(**changes: object) -> Known:
    values: dict[str, object] = {
        "now": NOW,
        "wall": WALL,
        "router": "router@1",
        "address": "a:1",
        "model": MODEL,
        "context_tokens": 512,
        "draining": False,
        "has_prefill_pool": True,
        "members": (),
        "rates": {},
        "queue": WaitingQueue(QueueLimits()).statistics(),
        "max_queue": 1024,
        "limits": lambda tenant: Limits(),
        "held": {},
        "totals": StoreTotals({}, {}),
        "requests": (),
        "running_requests": 0,
        "ended": (),
        "ended_requests": 0,
    }
    return Known(**{**values, **changes})


def test_members_are_shown_by_pool_with_what_can_be_sent_to_them() -> None:
    pages = PagesByState(free=900, owned=60, cached=30, granted=5, quarantined=4, pinned=1)
    busy = MemberLoad(running_sequences=3, waiting_sequences=2, waiting_tokens=70, decode_step_s=0.02, pages=pages)
    view = picture(
        known(
            members=[
                member("decode-1", Role.DECODE, MemberLoad(draining=True)),
                member("decode-0", Role.DECODE, busy, news_age_s=0.5),
                member("decode-2", Role.DECODE, stale=True, unfit="serves another model snapshot: x"),
                member("decode-3", Role.DECODE, lost="no sign of life for 10 s", stale=True),
                member("decode-4", Role.DECODE, unfit="serves another model snapshot: x"),
                KnownMember(Role.PREFILL, "prefill-0:1"),
            ],
            rates={"decode-0:1": Rate(50.0, 150.0)},
        )
    )
    prefill, decode = view.pools
    assert [(one.name, one.state) for one in prefill.members] == [("", MemberState.UNREACHED)]
    assert [one.state for one in decode.members] == [
        *(MemberState.READY, MemberState.DRAINING, MemberState.STALE, MemberState.LOST, MemberState.UNFIT)
    ]
    first = decode.members[0]
    assert (first.name, first.running_sequences, first.waiting_tokens, first.pages, first.pages.total) == (
        *("decode-0", 3, 70, pages, 1000),
    )
    assert (first.steps_per_s, first.tokens_per_s, first.news_age_s) == (50.0, 150.0, 0.5)
    assert decode.members[3].reason == "no sign of life for 10 s"
    assert [pool.role for pool in picture(known(has_prefill_pool=False)).pools] == ["decode"]


def test_the_queue_is_shown_by_priority_with_the_age_of_the_oldest() -> None:
    queue = WaitingQueue(QueueLimits())
    for number, (priority, arrived_at) in enumerate([(0, 99.0), (0, 97.0), (5, 98.5)]):
        queue.put(Waiting(f"r{number}", "t", priority, 10, arrived_at))
    shown = picture(known(queue=queue.statistics())).queue
    assert (shown.requests, shown.tokens, shown.max_requests, shown.tenants) == (3, 30, 1024, 1)
    assert [(lane.priority, lane.requests, lane.oldest_s) for lane in shown.lanes] == [(5, 1, 1.5), (0, 2, 3.0)]


def test_budgets_are_the_stores_and_without_it_this_routers_own() -> None:
    members = [member("decode-0", Role.DECODE), member("prefill-0", Role.PREFILL), member("gone", Role.DECODE, lost="x")]
    totals = StoreTotals({"pages:member:decode-0": 7, "pages:total:": 9, "pages:tenant:t": 2}, {})
    limits = {"": Limits(total_pages=50, tenant_pages=20), "t": Limits(total_pages=50, tenant_pages=30)}
    requests = [known_request(record(tenant="t"))]

    def shown(**changes: object) -> dict[str, tuple[int, int]]:
        view = picture(known(members=members, limits=limits.__getitem__, requests=requests, **changes))
        return {one.budget.label: (one.used, one.limit) for one in view.budgets}

    assert shown(totals=totals) == {
        "pages:member:decode-0": (7, 1000),
        "tokens:member:prefill-0": (0, 4000),
        "pages:total:": (9, 50),
        "pages:tenant:t": (2, 30),
    }
    alone = picture(known(totals=None))
    assert not alone.store_available and [(one.name, one.tells) for one in alone.routers] == [("router@1", True)]
    assert shown(totals=None, held={"tokens:member:prefill-0": 3})["tokens:member:prefill-0"] == (3, 4000)


def test_routers_are_those_whose_lease_holds() -> None:
    leases = {"router@1": Lease(4.0, "a:1"), "dead": Lease(-0.1, "b:1"), "another": Lease(2.0, "c:1")}
    view = picture(known(totals=StoreTotals({}, leases)))
    assert [(one.name, one.address, one.tells) for one in view.routers] == [("another", "c:1", False), ("router@1", "a:1", True)]


class Prefilling:
    """A call to a prefill member, as far as it is shown."""

    cached_tokens = 0

    def __init__(self, computed_tokens: int, done: PrefillDone | None = None) -> None:
        self.computed_tokens, self.done = computed_tokens, done


def test_a_request_is_shown_at_its_stage() -> None:
    sent = (Event.ACCEPTED, Event.TICKET, Event.SENT)

    def stage(*events: Event, computed: int | None = None, paused: bool = False) -> tuple[Stage, int]:
        progress = Progress(40, NOW - 9)
        progress.prefilling = Prefilling(computed) if computed is not None else None
        if Event.COMMITTED in events:
            progress.committed = Committed(0.0, 0.0, 0.0)
        shown = live_request(known_request(record("r", *events), progress, paused=paused), NOW, WALL)
        return shown.stage, shown.computed_prompt_tokens

    assert stage() == stage(Event.ACCEPTED) == (Stage.QUEUE, 0)
    assert stage(*sent[:2]) == (Stage.SEAT, 0)
    assert stage(*sent) == (Stage.PREFILL, 0)
    assert stage(*sent, computed=0) == (Stage.PREFILL_QUEUE, 0)
    assert stage(*sent, computed=16) == (Stage.PREFILL, 16)
    assert stage(*sent, computed=40) == (Stage.HANDOVER, 40)
    assert stage(*sent, Event.COMMITTED) == (Stage.DECODE, 40)
    assert stage(*sent, Event.COMMITTED, paused=True) == (Stage.READER, 40)
    assert stage(*sent, Event.COMMITTED, Event.STOPPED) == (Stage.SEND, 40)
    assert stage(*sent, Event.CANCEL) == (Stage.CANCEL, 0)


def test_a_request_has_its_ages_and_counts() -> None:
    progress = Progress(40, NOW - 9, output_token_ids=[1, 2, 3], decode_cached_tokens=16)
    shown = live_request(known_request(record("r", Event.ACCEPTED, Event.TICKET), progress, readers=2, unsent_bytes=5), NOW, WALL)
    assert (shown.age_s, shown.in_state_s, shown.output_tokens, shown.max_output_tokens) == (9.0, 7.0, 3, 8)
    assert (shown.prompt_tokens, shown.cached_prompt_tokens, shown.readers, shown.unsent_bytes) == (40, 16, 2, 5)
    assert (shown.timings.total_s, shown.timings.prefill_s) == (9.0, 0.0)
    progress.committed, progress.prefilling = Committed(1.0, 0.0, 0.0), Prefilling(40, PrefillDone(0, 0, 0.5, 2.0, 1.0, 0.25))
    timings = live_request(known_request(record(), progress), NOW, WALL).timings
    assert (timings.prefill_queue_s, timings.prefill_s, timings.handover_exposed_s) == (0.5, 2.0, 0.25)


def test_ends_are_kept_newest_first_and_bounded() -> None:
    ends = RecentEnds(most=2)
    for number in range(3):
        ended = record(f"r{number}", Event.ACCEPTED, Event.FAIL)
        ended.ending = Ending(FinishReason.TRANSPORT_ERROR, Cause.NO_MEMBER)
        ended.terminal_sequence_no = 0 if number else None
        ends.add(ended)
    assert [one.request_id for one in ends.newest()] == ["r2", "r1"] and (len(ends), ends.total) == (2, 3)
    assert ends.newest()[0].usage is not None and ends.newest()[0].at == WALL - 7
    ends.add(record("alive"))
    assert ends.total == 3


def test_a_tenants_view_tells_nothing_of_others() -> None:
    requests = [known_request(record("mine", tenant="a")), known_request(record("other", tenant="b"))]
    limits = Limits(tenant_pages=20)
    leases, members = {"router@1": Lease(4.0, "a:1")}, [member("decode-0", Role.DECODE)]
    seen = known(
        requests=requests, running_requests=2, limits=lambda tenant: limits, totals=StoreTotals({}, leases), members=members
    )
    view = picture(seen).of_tenant("a")
    assert [one.request_id for one in view.requests] == ["mine"] and view.running_requests == 1
    assert [one.budget.name for one in view.budgets] == ["decode-0", "a"]
    assert [one.address for one in view.routers] == [""] and view.pools[1].members[0].address == ""
    assert view.cut(0, 0).requests == () and view.cut(0, 0).running_requests == 1


def test_every_value_has_its_place_in_the_message() -> None:
    ended = record("e", Event.ACCEPTED, Event.FAIL)
    ended.ending, ends = Ending(FinishReason.DEADLINE_EXCEEDED, Cause.QUEUE_DEADLINE), RecentEnds()
    ends.add(ended)
    leases = {"router@1": Lease(4.0, "a:1")}
    message = cell_message(
        picture(
            known(
                members=[member("decode-0", Role.DECODE, MemberLoad(pages=PagesByState(free=3, cached=2)))],
                requests=[known_request(record("r", Event.ACCEPTED))],
                running_requests=1,
                totals=StoreTotals({}, leases),
                ended=ends.newest(),
                ended_requests=1,
            )
        )
    )
    assert (message.pools[1].members[0].pages.free, message.pools[1].members[0].pages.cached) == (3, 2)
    assert message.pools[1].members[0].state == pb.MEMBER_STATE_READY
    assert message.requests[0].stage == pb.REQUEST_STAGE_QUEUE and message.requests[0].state == 2
    one = message.ended[0]
    assert (one.cause, one.attempts, one.HasField("usage")) == ("queue_deadline", 1, False)
    assert State.FAILED is ended.state and message.budgets[0].limit == 1000


def test_rates_are_of_the_last_seconds_and_of_one_incarnation() -> None:
    rates = Rates(window_s=2.0)
    assert rates.look(10.0, {"a": ("i", 100, 1000)}) == {"a": Rate()}
    assert rates.look(11.0, {"a": ("i", 110, 1040)}) == {"a": Rate(10.0, 40.0)}
    assert rates.look(13.0, {"a": ("i", 110, 1040)})["a"] == Rate(0.0, 0.0)
    assert rates.look(13.0, {"a": ("i", 110, 1040)})["a"] == Rate(0.0, 0.0)
    assert rates.look(14.0, {"a": ("j", 5, 5)}) == {"a": Rate()}
    assert rates.look(15.0, {}) == {}
    assert rates.look(16.0, {"a": ("j", 50, 50)}) == {"a": Rate()}

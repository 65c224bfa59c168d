"""Drafts of a second model: what it has read is right after whatever happens, its pages come back, and nothing of it is seen."""

from collections.abc import Sequence

import pytest

from decode_svc.config import DecodeSettings
from decode_svc.draft_loading import DraftModel, drafts_for
from decode_svc.draft_model import FAILED_REST_CALLS, IDLE_CALLS, ModelDrafts
from decode_svc.draft_records import SPREAD_TOKENS, DraftCost, DraftOrigin
from decode_svc.drafts import Wish
from decode_svc.messages import PauseSeat
from decode_svc.preemption import PreemptionKind, Reservation
from decode_svc.seats import SeatState
from decode_svc.speculation import Speculation, SpeculationKind, SpeculationLimits
from decode_svc.step_cost import StepCost
from engine.layout import pages_for
from lifecycle.finish import FinishReason
from tests.scripted import ScriptedRunner, ScriptedTokenizer
from tests.unit.decode_world import PAGE_TOKENS
from tests.unit.pressure_world import PressureWorld

MOST = 5
VOCABULARY = ScriptedTokenizer().vocabulary_size


def drafter(*, right: bool = True, total_pages: int = 80, **settings: object) -> ScriptedRunner:
    """A model that says what the drafted one does, or never does."""
    wrong = None if right else (lambda history: 200)
    made = {"page_tokens": PAGE_TOKENS, "context_tokens": 64, "vocabulary_size": VOCABULARY, "otherwise": wrong, **settings}
    runner = ScriptedRunner(total_pages=total_pages, **made)  # type: ignore[arg-type]
    runner.slack_tokens = MOST
    return runner


def world(runner: ScriptedRunner | None = None, kind: str = "draft_model", **options: object) -> PressureWorld:
    """With a draft model, rows that cost next to nothing, and pages for everybody unless told otherwise."""
    settings: dict[str, object] = {"total_pages": 80, "reservation": Reservation.FULL, **options}
    speculation = SpeculationLimits(SpeculationKind(kind), MOST)
    made = PressureWorld(speculation=speculation, drafter=runner or drafter(), **settings)  # type: ignore[arg-type]
    made.exact_drafts = kind == "draft_model"
    for rows in (1, 100) * 20:
        made.scheduler.speculation.cost.add(rows, 0.01)
    return made


@pytest.mark.parametrize("window", [None, 5])
def test_a_model_that_says_the_same_is_always_right(window: int | None) -> None:
    made = world(drafter(window=window))
    prompts = {made.open(ids, 25): ids for ids in ((1, 2, 3), (4,), tuple(range(20)))}
    made.run(400)
    for seat, ids in prompts.items():
        made.said(seat, ids)
        assert len(made.selected(seat)) == 25 and made.ending(seat).reason is FinishReason.MAX_OUTPUT_TOKENS
    counts = made.scheduler.speculation.counts_by_origin()[DraftOrigin.DRAFT_MODEL]
    assert counts.accepted_tokens == counts.drafted_tokens > 50 and made.scheduler.steps < 20
    made.assert_empty()


def test_a_model_that_says_something_else_changes_nothing_but_the_time() -> None:
    made = world(drafter(right=False))
    made.exact_drafts = False
    prompts = {made.open(ids, 25): ids for ids in ((1, 2, 3), (4,))}
    made.run()
    for seat, ids in prompts.items():
        made.said(seat, ids)
    counts = made.scheduler.speculation.counts
    assert counts.drafted_tokens > 0 == counts.accepted_tokens
    made.assert_empty()


def test_texts_are_read_in_bounded_chunks_who_lacks_least_first() -> None:
    runner = drafter()
    made = world(runner, reads=6)
    short, long = made.open((1, 2), 30), made.open(tuple(range(20)), 30)
    first: dict[int, int] = {}
    while made.scheduler.seats.get(long) is not None:
        before = len(runner.batches)
        plan = made.step()
        assert plan is not None
        for seat in plan.drafts:
            first.setdefault(seat, made.scheduler.steps)
        batches = runner.batches[before:]
        assert all(batch.scheduled_tokens <= 6 for batch in batches)
        assert all(batch.scheduled_tokens <= 2 for batch in batches[1:]), "behind the first batch there is a row for each draft"
    assert first[short] + 3 <= first[long]


def test_sequences_that_find_no_pages_go_without() -> None:
    made = world(drafter(total_pages=1 + pages_for(3 + 30, PAGE_TOKENS)))
    first, second = made.open((1, 2, 3), 30), made.open((4, 5, 6), 30)
    drafted = set[int]()
    while made.scheduler.seats.get(first) is not None:
        plan = made.step()
        assert plan is not None
        drafted |= set(plan.drafts)
    assert drafted == {first}
    made.run(400)
    made.said(second, (4, 5, 6))
    assert len(made.selected(second)) == 30
    made.assert_empty()


def test_who_asks_no_more_gives_its_pages_to_who_asks() -> None:
    made = world()
    first, second = (Wish(seat, made.seat(seat).sequence, 3) for seat in (made.open((1, 2, 3), 30), made.open((4, 5), 30)))
    made.step()
    number = made.open((1,), 60)
    made.step()
    long = Wish(number, made.seat(number).sequence, 3)
    drafts = ModelDrafts(drafter(total_pages=1 + pages_for(32, PAGE_TOKENS)), VOCABULARY, 16)
    assert drafts.propose([first, second]).keys() == {first.seat}
    for _ in range(IDLE_CALLS - 1):
        assert not drafts.propose([second])
    assert drafts.propose([second]).keys() == {second.seat} and drafts.sequences == 1
    for _ in range(IDLE_CALLS + 1):
        assert not drafts.propose([long])
    assert drafts.sequences == 1, "who can never have enough pages takes none from others"
    assert drafts.check() == []
    drafts.forget(second.seat)
    assert drafts.pages == drafts.sequences == 0


def test_a_failed_step_of_the_draft_model_ends_nobody() -> None:
    runner = drafter()
    made = world(runner, stream_bytes=10_000)
    seat = made.open((1, 2, 3), 40)
    made.step()
    runner.fail_when = lambda history: True
    made.step()
    made.step()
    books = made.scheduler.books()
    assert books["draft_pages_used"] == books["draft_sequences"] == 0
    runner.fail_when = lambda history: False
    ran = len(runner.batches)
    made.run(400)
    assert len(runner.batches) == ran, "it rests"
    made.said(seat, (1, 2, 3))
    assert len(made.selected(seat)) == 40
    for number in range(FAILED_REST_CALLS // 15):
        made.open((number, 7), 20)
        made.run(400)
    assert len(runner.batches) > ran, "it is asked again"
    made.assert_empty()


def test_what_the_model_can_say_nothing_to_goes_without() -> None:
    """Logits that are no numbers, an id that only the other one has, and a text that is longer than its context."""
    runner = drafter(vocabulary_size=240, context_tokens=12)
    runner.poison_when = lambda history: history[0] == 7
    made = world(runner)
    prompts = {made.open(ids, 15): ids for ids in ((7, 1), (2, 250), (3, 4))}
    drafted = dict.fromkeys(prompts, 0)
    for _ in range(100):
        plan = made.step()
        if plan is None:
            break
        for seat, drafts in plan.drafts.items():
            drafted[seat] += len(drafts)
    for seat, ids in prompts.items():
        made.said(seat, ids)
        assert len(made.selected(seat)) == 15
    assert list(drafted.values())[:2] == [0, 0] and 0 < list(drafted.values())[2] <= 12
    made.assert_empty()


def test_a_seat_that_stands_still_holds_no_page_of_the_model() -> None:
    made = world()
    seat = made.open((1, 2, 3), 40)
    made.step()
    made.step()
    assert made.scheduler.books()["draft_pages_used"] and made.scheduler.books()["draft_sequences"] == 1
    made.step(PauseSeat(seat))
    made.step()
    assert made.seat(seat).state is SeatState.PAUSED
    books = made.scheduler.books()
    assert books["draft_pages_used"] == books["draft_sequences"] == 0
    made.cancel(seat)
    made.step()
    made.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_preempted_sequences_are_read_again(kind: PreemptionKind) -> None:
    speculation = SpeculationLimits(SpeculationKind.DRAFT_MODEL, MOST)
    made = PressureWorld(kind, speculation=speculation, drafter=drafter(), total_pages=13)
    made.exact_drafts = True
    prompts = {made.open(ids, 25): ids for ids in ((1, 2, 3), (4, 5), (6, 7, 8, 9, 10))}
    made.run(400)
    assert made.preempted and made.scheduler.speculation.counts.accepted_tokens
    for seat, ids in prompts.items():
        made.said(seat, ids)
        assert len(made.selected(seat)) == 25
    made.assert_empty()


def test_the_text_goes_before_the_model() -> None:
    runner = drafter()
    made = world(runner, "both", right=0.5)
    seat = made.open((1, 2, 3), 40)
    made.run()
    made.said(seat, (1, 2, 3))
    by_origin = made.scheduler.speculation.counts_by_origin()
    assert [origin.value for origin, counts in by_origin.items() if counts.drafted_tokens] == ["prompt_lookup", "draft_model"]
    model = by_origin[DraftOrigin.DRAFT_MODEL]
    assert model.accepted_tokens == model.drafted_tokens
    counts = made.scheduler.speculation.counts
    assert counts.drafted_tokens == sum(each.drafted_tokens for each in by_origin.values())
    made.assert_empty()


def test_what_drafts_take_to_make_decides_whether_they_pay() -> None:
    cost = DraftCost()
    assert cost.token_s == 0.0
    cost.add(0, 0.32)
    assert cost.token_s == pytest.approx(0.32 / SPREAD_TOKENS)
    for _ in range(400):
        cost.add(4, 0.02)
    assert cost.token_s == pytest.approx(0.005, rel=0.01)
    for _ in range(400):
        cost.add(0, 0.0)
    assert cost.token_s < 0.0001, "what nobody renews fades"
    step = StepCost()
    for rows in (1, 9) * 40:
        step.add(rows, 0.010 + 0.001 * rows)
    assert step.row_share(1, 0.011) == pytest.approx(step.row_share(1) + 1.0, rel=0.05)


def test_a_model_that_is_too_slow_is_not_asked_and_tried_again_later() -> None:
    made = world(stream_bytes=100_000)
    seat = made.open((1, 2, 3), 60)
    made.step()
    drafted = []
    while made.scheduler.seats.get(seat) is not None:
        plan = made.step()
        if plan is not None:
            made.scheduler.speculation.ran(plan, 0.01, draft_s=0.05 * len(plan.drafts_of(plan.seats[0])))
            drafted.append(bool(plan.drafts))
    assert drafted[0] and not all(drafted) and sum(drafted) < len(drafted) / 2


def test_settings_are_checked() -> None:
    settings = DecodeSettings(speculation="both", draft_model="small", draft_tokens=3)
    assert settings.scheduler_limits().speculation.kind is SpeculationKind.BOTH
    with pytest.raises(ValueError, match="speculation is draft_model, and draft_model is not set"):
        DecodeSettings(speculation="draft_model")
    with pytest.raises(ValueError, match="draft_model is small, and speculation is prompt_lookup"):
        DecodeSettings(speculation="prompt_lookup", draft_model="small")
    with pytest.raises(ValueError, match="there is no draft model"):
        Speculation(SpeculationLimits(SpeculationKind.DRAFT_MODEL), world().memory)
    with pytest.raises(ValueError, match="draft_step_tokens is 0"):
        ModelDrafts(drafter(), VOCABULARY, 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([b"more"], "draft_model small has a vocabulary of 259 ids, model large one of 258"),
        ([b"as"], "id 256 is b'as' there and b'is' here"),
        ([b"is"], ""),
    ],
)
def test_vocabularies_must_be_the_same(words: Sequence[bytes], says: str) -> None:
    own = ScriptedTokenizer([b"is"])
    other = ScriptedTokenizer([*words, b"x"] if "259" in says else words)
    draft = DraftModel("small", drafter(), other)
    if not says:
        assert drafts_for(draft, "large", drafter(), own, 8) is not None
        assert drafts_for(None, "large", drafter(), own, 8) is None
        return
    with pytest.raises(ValueError, match=says):
        drafts_for(draft, "large", drafter(), own, 8)

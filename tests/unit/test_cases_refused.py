"""Cases from the field that cannot happen here by construction, shown to be impossible or refused."""

import dataclasses

import pytest

from decode_svc.seats import SEAT_EDGES, SeatState
from engine.layout import GroupKind, GroupLayout, Layout
from kv_transfer.grants import READER_TABLE, READER_TERMINAL, WRITER_TABLE, WRITER_TERMINAL, ReaderState, WriterState
from lifecycle.states import TABLE, TERMINAL, Event, State
from tests.unit.chart_render import VALUE_SETS, of_kind, rendered
from tests.unit.decode_world import World

GROUP = GroupLayout(GroupKind.FULL, layers=30, kv_heads=3, head_dim=64, page_tokens=16, dtype="bfloat16")


def test_b22_every_state_has_a_way_out() -> None:
    for state in set(State) - TERMINAL - {State.CANCEL_REQUESTED}:
        assert TABLE[state, Event.CANCEL] is State.CANCEL_REQUESTED
    for state in set(State) - TERMINAL:
        assert TABLE[state, Event.FAIL] is State.FAILED
    for seat in set(SeatState) - {SeatState.ENDED}:
        assert SEAT_EDGES[seat] & {SeatState.ENDED, SeatState.RECLAIMING}
    leaves = {state for state, _ in READER_TABLE}
    assert leaves == set(ReaderState) - READER_TERMINAL
    assert {state for state, _ in WRITER_TABLE} == set(WriterState) - WRITER_TERMINAL


def test_b48_equal_prompts_share_no_page() -> None:
    world = World()
    first, second = world.granted_seat(prompt=8), world.granted_seat(prompt=8)
    grants = [world.grant_of(seat) for seat in (first, second)]
    # Nothing is looked up by content, so no tenant can hit what another one left.
    assert [grant.first_position for grant in grants] == [0, 0]
    assert not set(grants[0].groups[0].page_ids) & set(grants[1].groups[0].page_ids)


@pytest.mark.parametrize("name", VALUE_SETS)
def test_b51_a_pool_has_one_autoscaler_or_a_number_of_pods(name: str) -> None:
    found = rendered(name)
    scalers = [*of_kind(found, "HorizontalPodAutoscaler").values(), *of_kind(found, "ScaledObject").values()]
    scaled = [(each["spec"]["scaleTargetRef"]["kind"], each["spec"]["scaleTargetRef"]["name"]) for each in scalers]
    assert len(scaled) == len(set(scaled))
    for kind in ("Deployment", "LeaderWorkerSet"):
        for each in of_kind(found, kind).values():
            if (kind, each["metadata"]["name"]) in scaled:
                assert "replicas" not in each["spec"], "an upgrade would undo what the autoscaler did"


def test_b56_the_fingerprint_covers_every_field_of_the_layout() -> None:
    layout = Layout("snapshot", (GROUP,))
    behind_a_window = dataclasses.replace(GROUP, kind=GroupKind.SLIDING, window=64)
    others = {
        "kind": dataclasses.replace(GROUP, kind=GroupKind.LATENT),
        "layers": dataclasses.replace(GROUP, layers=29),
        "kv_heads": dataclasses.replace(GROUP, kv_heads=4),
        "head_dim": dataclasses.replace(GROUP, head_dim=32),
        "page_tokens": dataclasses.replace(GROUP, page_tokens=32),
        "dtype": dataclasses.replace(GROUP, dtype="float32"),
        "window": dataclasses.replace(behind_a_window, window=65),
    }
    assert set(others) == {field.name for field in dataclasses.fields(GroupLayout)}, "a new field must be in the fingerprint too"
    assert {field.name for field in dataclasses.fields(Layout)} == {
        "model_snapshot",
        "groups",
        "positions",
        "weight_quantisation",
    }
    layouts = [Layout("snapshot", (group,)) for group in (GROUP, behind_a_window, *others.values())]
    layouts += [Layout("other", (GROUP,)), Layout("snapshot", (GROUP, GROUP)), Layout("snapshot", (GROUP,), "positions")]
    layouts += [dataclasses.replace(layout, weight_quantisation="int8")]
    # Of several groups each counts, and their order.
    layouts += [Layout("snapshot", (GROUP, group)) for group in (behind_a_window, *others.values())]
    layouts += [Layout("snapshot", (group, GROUP)) for group in (behind_a_window, *others.values())]
    assert len({each.fingerprint for each in (layout, *layouts)}) == len(layouts)

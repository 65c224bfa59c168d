"""Offers, plans and notices: what is written where."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import GroupKind, GroupLayout, Layout
from kv_transfer.offer import BadGrant, LayoutMismatch, grant_from_proto, grant_to_proto
from kv_transfer.plan import (
    TRANSFER_BYTES_MAX,
    BadNotice,
    Computed,
    LandingPart,
    Notice,
    PagePart,
    SourceMissing,
    part_count,
    plan,
)
from member.kv_layout import layout_view
from tests.unit.handover_values import FINGERPRINT, PAGE_BYTES, READER_BASE, ROW_BYTES, WRITER_BASE, grant, layout, source


def copies(work, tables, row=0):
    """Every (writer byte range, reader byte range) of a plan."""
    return [r for i in range(len(work.parts)) for r in work.ranges(i, tables, row)]


def test_a_grant_survives_the_wire():
    one = grant(32, 500)
    assert grant_from_proto(grant_to_proto(one), layout()) == one


def damaged(field, value):
    def change(message):
        target = message
        *path, last = field.split(".")
        for name in path:
            target = getattr(target, name)[0] if name in ("groups", "slabs") else getattr(target, name)
        if isinstance(value, list):
            del getattr(target, last)[:]
            getattr(target, last).extend(value)
        else:
            setattr(target, last, value)

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (damaged("grant_id", b"short"), "grant_id"),
        (damaged("key.request_id", ""), "key.request_id"),
        (damaged("key.attempt", 0), "key.attempt"),
        (damaged("decode.incarnation", ""), "peer.incarnation"),
        (damaged("decode.address", "x" * 300), "peer.address"),
        (damaged("first_position", 3), "first_position"),
        (damaged("first_position", 101), "first_position"),
        (damaged("first_position", 16), "groups[0].page_ids"),
        (damaged("token_count", 0), "token_count"),
        (damaged("token_count", 1 << 25), "token_count"),
        (damaged("token_count", 200), "groups[0].page_ids"),
        (damaged("groups.page_ids", [1, 2]), "groups.generations"),
        (damaged("groups.page_ids", [1, 2, 3, 4, 5, 6, 4096]), "groups.page_ids"),
        (damaged("groups.page_ids", [1, 2, 3, 4, 5, 6, 6]), "groups.page_ids"),
        (damaged("groups.page_ids", [0, 2, 3, 4, 5, 6, 7]), "groups.page_ids"),
        (damaged("landing_row", 8), "landing_row"),
        (damaged("endpoint.agent", "\x00"), "endpoint.agent"),
        (damaged("endpoint.metadata", b"metadatA"), "endpoint.metadata_crc32"),
        (damaged("endpoint.metadata", b""), "endpoint.metadata"),
        (damaged("endpoint.slabs.size_bytes", 7), "endpoint.slabs.size_bytes"),
        (damaged("endpoint.slabs.unit_bytes", 0), "endpoint.slabs.unit_bytes"),
        (damaged("endpoint.slabs.base_address", (1 << 64) - 1), "endpoint.slabs.base_address"),
        (lambda message: message.endpoint.slabs.pop(), "endpoint.slabs"),
        (lambda message: message.groups.pop(), "endpoint.slabs"),
        (lambda message: message.ClearField("endpoint"), "endpoint"),
        (damaged("expires_after_s", 0.0), "expires_after_s"),
        (damaged("expires_after_s", float("nan")), "expires_after_s"),
        (damaged("expires_after_s", float("inf")), "expires_after_s"),
    ],
)
def test_a_bad_grant_is_refused_naming_the_field(change, field):
    message = grant_to_proto(grant())
    change(message)
    with pytest.raises(BadGrant) as caught:
        grant_from_proto(message, layout())
    assert caught.value.field == field


def test_b56_unlike_layouts_are_refused_with_both_named():
    with pytest.raises(LayoutMismatch, match=FINGERPRINT):
        grant_from_proto(grant_to_proto(grant()), dataclasses.replace(layout(), fingerprint="cd" * 16))
    with pytest.raises(LayoutMismatch):
        plan(grant(), dataclasses.replace(source(), layout=dataclasses.replace(layout(), fingerprint="cd" * 16)))
    with pytest.raises(BadGrant, match="unit_bytes"):
        plan(grant(), source(page_bytes=(PAGE_BYTES * 2,)))


def test_pools_whose_weights_are_quantised_unlike_are_refused_with_both_named():
    plain = Layout("snapshot", (GroupLayout(GroupKind.FULL, 30, 3, 64, 16, "bfloat16"),))
    quantised = dataclasses.replace(plain, weight_quantisation="int8")
    message = grant_to_proto(dataclasses.replace(grant(), layout_fingerprint=quantised.fingerprint))
    assert grant_from_proto(message, layout_view(quantised)).layout_fingerprint == quantised.fingerprint
    named = "weight_quantisation 'int8' there and 'off' here.*: start both pools with one .*weight_quantisation"
    with pytest.raises(LayoutMismatch, match=named) as caught:
        grant_from_proto(message, layout_view(plain))
    assert quantised.fingerprint in str(caught.value) and plain.fingerprint in str(caught.value)


def test_a_page_that_has_left_its_window_can_not_be_asked_for():
    """96 tokens and a window of 40: the next token sees from position 57 on, which lies in page number 3."""
    windowed = dataclasses.replace(layout(16, 16), windows=(None, 40))
    sizes = {"page_tokens": (16, 16), "page_bytes": (PAGE_BYTES, PAGE_BYTES)}
    fits = grant(0, 96, page_ids=((1, 2, 3, 4, 5, 6), (0, 0, 0, 13, 14, 15)), **sizes)
    assert grant_from_proto(grant_to_proto(fits), windowed) == fits
    late = grant(0, 96, page_ids=((1, 2, 3, 4, 5, 6), (0, 0, 12, 13, 14, 15)), **sizes)
    with pytest.raises(BadGrant, match="that 96 tokens need is number 3, number 2 is asked for") as caught:
        grant_from_proto(grant_to_proto(late), windowed)
    assert caught.value.field == "groups[1].page_ids"
    # What the reader has already counts too: page numbers begin behind it.
    late = grant(16, 96, page_ids=((2, 3, 4, 5, 6), (0, 12, 13, 14, 15)), **sizes)
    with pytest.raises(BadGrant, match="number 2 is asked for"):
        grant_from_proto(grant_to_proto(late), windowed)


def test_a_plan_of_the_default_model():
    work = plan(grant(0, 500), source())
    assert part_count(work.grant) == len(work.parts) == 7  # 32 pages, 16 to a part, in three pieces each; and the row
    assert work.size_bytes == 32 * PAGE_BYTES + ROW_BYTES
    assert isinstance(work.parts[-1], LandingPart)
    assert len(work.ranges(0, [range(40, 72)], 0)) == 16


def test_small_pages_go_whole_and_neighbours_on_both_sides_are_one_copy():
    work = plan(grant(0, 500, page_bytes=(8192,)), source(page_bytes=(8192,)))
    assert part_count(work.grant) == len(work.parts) == 2
    assert len(work.ranges(0, [range(40, 72)], 0)) == 1
    assert len(work.ranges(0, [[40 + i * 2 for i in range(32)]], 0)) == 32


def ready_parts(work, tokens):
    """How many parts are ready with so many positions; always the first ones."""
    ready = work.ready(Computed(tokens))
    assert ready == tuple(range(len(ready)))
    return len(ready)


@pytest.mark.parametrize(("computed", "ready"), [(0, 0), (255, 0), (256, 3), (499, 3), (500, 7)])
def test_parts_become_ready_in_order_and_the_last_page_with_the_whole_prompt(computed, ready):
    assert ready_parts(plan(grant(0, 500), source()), computed) == ready


@pytest.mark.parametrize(
    ("layers", "ready"),
    [(0, [0, 1, 2]), (9, [0, 1, 2]), (10, [0, 1, 2, 3]), (29, [0, 1, 2, 3, 4]), (30, list(range(6)))],
)
def test_pieces_are_ready_while_their_step_goes_on_and_the_row_is_not(layers, ready):
    """The default model's 30 layers; a step has the positions from 256 to the end, the first pages are complete."""
    assert list(plan(grant(0, 500), source()).ready(Computed(256, 500, layers, 30))) == ready


def test_layers_that_do_not_divide_into_pieces_are_waited_for():
    work = plan(grant(0, 160), source())
    assert [work.ready(Computed(0, 160, layers, 4)) for layers in (1, 2, 3, 4)] == [(), (0,), (0, 1), (0, 1, 2)]


def test_a_full_prefix_hit_has_no_pages_and_still_a_landing_row():
    work = plan(grant(64, 64), source())
    assert [type(p) for p in work.parts] == [LandingPart]
    assert (ready_parts(work, 63), ready_parts(work, 64)) == (0, 1)
    assert work.notice(0).page_counts == (0,)


def test_a_grant_without_a_landing_row_carries_pages_only():
    one = dataclasses.replace(grant(0, 500), landing_row=None)
    assert grant_from_proto(grant_to_proto(one), layout()) == one
    work = plan(one, source())
    assert [type(p) for p in work.parts] == [PagePart] * 6 and len(work.parts) == part_count(one)
    assert work.size_bytes == 32 * PAGE_BYTES
    assert ready_parts(work, 500) == 6 and work.notice(2).parts == 6
    with pytest.raises(BadGrant, match="nothing would be sent"):
        dataclasses.replace(grant(64, 64), landing_row=None)


def test_a_page_above_the_bound_of_a_transfer_is_cut_into_pieces():
    size = 2 * TRANSFER_BYTES_MAX + 4096
    work = plan(grant(0, 40, page_bytes=(size,)), source(page_bytes=(size,)))
    assert len(work.parts) == part_count(work.grant) == 3 * 3 + 1
    mapped = copies(work, [[7, 8, 9]])
    assert all(r.size_bytes <= TRANSFER_BYTES_MAX for r in mapped)
    assert sum(r.size_bytes for r in mapped) == 3 * size + ROW_BYTES == work.size_bytes


def test_pages_that_left_a_sliding_window_are_not_sent():
    one = grant(0, 96, page_ids=((0, 0, 0, 13, 14, 15),))
    work = plan(one, source())
    assert [p.page_numbers for p in work.parts if isinstance(p, PagePart)] == [(3, 4, 5)] * 3
    # The writer may have dropped those pages as well.
    assert len(copies(work, [[0, 0, 0, 40, 42, 44]])) == 3 * 3 + 1
    with pytest.raises(SourceMissing, match="page number 3"):
        copies(work, [[1, 2, 3]])
    with pytest.raises(SourceMissing, match="page number 5"):
        copies(work, [[1, 2, 3, 4, 5, 0]])


def test_b01_the_front_that_the_reader_has_is_trimmed_from_the_front_and_counts_must_fit():
    work = plan(grant(48, 100, page_ids=((21, 22, 23, 24),)), source())
    reads = [(r.local_address - WRITER_BASE) // PAGE_BYTES for r in copies(work, [[50, 52, 54, 56, 58, 60, 62]])[:-1]]
    writes = [(r.remote_address - READER_BASE) // PAGE_BYTES for r in copies(work, [[50, 52, 54, 56, 58, 60, 62]])[:-1]]
    assert list(zip(reads, writes, strict=True)) == [(56, 21), (58, 22), (60, 23), (62, 24)] * 3
    with pytest.raises(BadGrant, match="need 4 pages of 16 tokens, got 3"):
        plan(grant(48, 100, page_ids=((21, 22, 23),)), source())
    with pytest.raises(BadGrant, match="need 4 pages of 16 tokens, got 5"):
        plan(grant(48, 100, page_ids=((21, 22, 23, 24, 25),)), source())


@given(
    st.integers(1, 600),
    st.data(),
    st.sampled_from([(16,), (16, 32), (8, 64)]),
)
def test_b26_every_position_goes_to_the_page_of_its_number(tokens, data, page_tokens):
    """Against a dumb model that walks position by position, with any cached front and spare pages on both sides."""
    widest = max(page_tokens)
    first = data.draw(st.integers(0, tokens // widest)) * widest
    sizes = (PAGE_BYTES, 4096 * 5)[: len(page_tokens)]
    one = grant(first, tokens, page_tokens, sizes)
    work = plan(one, source(page_tokens, sizes))
    spare = data.draw(st.integers(0, 2))  # the writer may hold a page for the next token
    tables = [[100 + (i * 7) % 501 for i in range(-(-tokens // size) + spare)] for size in page_tokens]
    mapped: dict[int, int] = {}
    for r in copies(work, tables, 3)[:-1]:
        assert r.size_bytes <= TRANSFER_BYTES_MAX
        mapped |= {r.local_address + o: r.remote_address + o for o in range(0, r.size_bytes, 4096)}
    wanted: dict[int, int] = {}
    for group, (size, page_bytes) in enumerate(zip(page_tokens, sizes, strict=True)):
        for position in range(first, tokens):
            number = position // size
            here = work.source.slabs[group].address(tables[group][number])
            there = one.endpoint.slabs[group].address(one.groups[group].page_ids[number - first // size])
            wanted |= {here + o: there + o for o in range(0, page_bytes, 4096)}
    assert mapped == wanted
    ready = [ready_parts(work, n) for n in range(tokens + 1)]
    assert ready == sorted(ready)
    assert ready[-1] == len(work.parts) == part_count(one)
    for n in range(tokens):
        sent = [p for p in work.parts[: ready[n]] if isinstance(p, PagePart)]
        assert all((p.page_numbers[-1] + 1) * page_tokens[p.group] <= n for p in sent)


@given(
    st.integers(0, 100),
    st.integers(1, 100),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=32),
    st.binary(min_size=16, max_size=16),
)
def test_a_notice_survives_the_wire(part, more, tokens, counts, grant_id):
    notice = Notice(grant_id.hex(), part, part + more, tokens, tuple(counts), FINGERPRINT)
    assert Notice.from_bytes(notice.to_bytes()) == notice


@given(st.data())
def test_a_changed_notice_is_refused(data):
    good = plan(grant(), source()).notice(0).to_bytes()
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    flipped = bytearray(good)
    flipped[bit // 8] ^= 1 << bit % 8
    cut = data.draw(st.integers(0, len(good) - 1))
    for bad in (bytes(flipped), good[:cut], good + b"\0"):
        with pytest.raises(BadNotice):
            Notice.from_bytes(bad)


def test_a_notice_of_a_part_that_cannot_be_is_refused():
    with pytest.raises(BadNotice, match="part 3 of 3"):
        Notice.from_bytes(Notice("00" * 16, 3, 3, 1, (1,), FINGERPRINT).to_bytes())

"""Page geometry, its fingerprint, and the batch a step is described by."""

from dataclasses import replace

import pytest

from engine.batch import Batch, Rows
from engine.layout import GroupKind, GroupLayout, Layout, pages_for

GROUP = GroupLayout(GroupKind.FULL, layers=30, kv_heads=3, head_dim=64, page_tokens=16, dtype="bfloat16")
LAYOUT = Layout("snapshot", (GROUP,))


def sliding(window: int, page_tokens: int = 16) -> GroupLayout:
    return replace(GROUP, kind=GroupKind.SLIDING, window=window, page_tokens=page_tokens)


def test_sizes_of_the_default_model_are_those_of_the_design() -> None:
    assert (GROUP.row_elements, GROUP.row_bytes, GROUP.token_bytes, GROUP.page_bytes) == (384, 768, 23_040, 368_640)
    assert LAYOUT.token_bytes == 23_040


def test_a_latent_group_stores_one_vector_a_token() -> None:
    assert replace(GROUP, kind=GroupKind.LATENT).row_elements == 192


@pytest.mark.parametrize(
    "change",
    [
        {"kind": GroupKind.SLIDING, "window": 64},
        {"kind": GroupKind.LATENT},
        {"layers": 29},
        {"kv_heads": 4},
        {"head_dim": 32},
        {"page_tokens": 32},
        {"dtype": "float32"},
    ],
)
def test_every_field_of_a_group_changes_the_fingerprint(change: dict[str, object]) -> None:
    other = Layout("snapshot", (replace(GROUP, **change),))
    assert other.fingerprint != LAYOUT.fingerprint


def test_windows_of_unlike_width_are_unlike_layouts() -> None:
    narrow, wide = (Layout("snapshot", (GROUP, sliding(window))) for window in (64, 65))
    assert len({narrow.fingerprint, wide.fingerprint, Layout("snapshot", (sliding(64), GROUP)).fingerprint}) == 3


def test_the_fingerprint_names_the_model_and_is_stable() -> None:
    assert Layout("other", (GROUP,)).fingerprint != LAYOUT.fingerprint
    assert Layout("snapshot", (GROUP, GROUP)).fingerprint != LAYOUT.fingerprint
    assert Layout("snapshot", (replace(GROUP),)).fingerprint == LAYOUT.fingerprint
    assert len(LAYOUT.fingerprint) == 32
    int(LAYOUT.fingerprint, 16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": 0}, "layers"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"page_tokens": 1025}, "1024"),
        ({"dtype": "int3"}, "dtype"),
        ({"window": 8}, "window is 8 in a group of kind full"),
        ({"kind": GroupKind.SLIDING}, "window is None in a group of kind sliding"),
        ({"kind": GroupKind.SLIDING, "window": 0}, "at least 1 token"),
    ],
)
def test_a_wrong_geometry_names_its_field(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(GROUP, **change)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 16) == pages


def test_pages_for_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="tokens"):
        pages_for(-1, 16)


@pytest.mark.parametrize(("window", "page_tokens"), [(1, 4), (2, 4), (5, 4), (8, 4), (9, 4), (7, 1), (3, 16)])
def test_pages_behind_a_window(window: int, page_tokens: int) -> None:
    """Against the definition: a page is needed while the next query, or a later one, sees a token of it."""
    group = sliding(window, page_tokens)
    for cached in range(6 * page_tokens):
        seen = [position for position in range(cached + 1) if position > cached - window]
        assert group.first_page(cached) == min(seen) // page_tokens
    for step_tokens in (1, 2, 3, 11):
        held = [
            pages_for(cached + step_tokens, page_tokens) - group.first_page(cached) for cached in range(20 * page_tokens + window)
        ]
        assert group.most_pages(10_000, step_tokens) == max(held)
        assert group.most_pages(3, step_tokens) == min(max(held), pages_for(3, page_tokens))


def test_a_group_without_a_window_needs_all_its_pages() -> None:
    assert GROUP.first_page(1000) == 0
    assert GROUP.most_pages(1000, 1) == pages_for(1000, 16)


def test_a_batch_counts_tokens_and_sequences_apart() -> None:
    batch = Batch((Rows("a", (1, 2, 3), 0, ([1],), False), Rows("b", (4,), 9, ([2],), True)))
    assert (batch.scheduled_tokens, batch.scheduled_sequences) == (4, 2)
    assert batch.rows[1].end_position == 10


def test_a_sequence_is_scheduled_at_most_once() -> None:
    row = Rows("a", (1,), 0, ([1],), True)
    with pytest.raises(ValueError, match="twice"):
        Batch((row, replace(row, first_position=1)))


def test_rows_that_mean_nothing_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="token_ids"):
        Rows("a", (), 0, ([1],), True)
    with pytest.raises(ValueError, match="first_position"):
        Rows("a", (1,), -1, ([1],), True)
    with pytest.raises(ValueError, match="pages"):
        Rows("a", (1,), 0, (), True)
    with pytest.raises(ValueError, match="rows"):
        Batch(())


def test_keys_of_prefixes_need_pages_of_one_length() -> None:
    assert LAYOUT.prefix_keys is not None and LAYOUT.prefix_keys.page_tokens == GROUP.page_tokens
    assert Layout("snapshot", (GROUP,), "rope").prefix_keys != LAYOUT.prefix_keys
    window, short = replace(GROUP, kind=GroupKind.SLIDING, window=64), replace(GROUP, page_tokens=8)
    assert Layout("snapshot", (GROUP, window)).prefix_keys not in (None, LAYOUT.prefix_keys)
    assert Layout("snapshot", (GROUP, short)).prefix_keys is None

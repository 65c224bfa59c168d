"""Page geometry, its fingerprint, and the batch a step is described by."""

from dataclasses import replace

import pytest

from engine.batch import Batch, Rows
from engine.layout import GroupKind, GroupLayout, Layout, pages_for

GROUP = GroupLayout(GroupKind.FULL, layers=30, kv_heads=3, head_dim=64, page_tokens=16, dtype="bfloat16")
LAYOUT = Layout("snapshot", (GROUP,))


def test_sizes_of_the_default_model_are_those_of_the_design() -> None:
    assert (GROUP.row_elements, GROUP.row_bytes, GROUP.token_bytes, GROUP.page_bytes) == (384, 768, 23_040, 368_640)
    assert LAYOUT.token_bytes == 23_040


def test_a_latent_group_stores_one_vector_a_token() -> None:
    assert replace(GROUP, kind=GroupKind.LATENT).row_elements == 192


@pytest.mark.parametrize(
    "change",
    [
        {"kind": GroupKind.SLIDING},
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

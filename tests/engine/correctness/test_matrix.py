"""F12: the engine in every situation and on every backend against transformers; see docs/correctness.md."""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from engine.backend import BackendUnfit
from engine.quantisation import WeightQuantisation
from rpc import clocks
from tests.engine.correctness import ends, pressure, serving
from tests.engine.correctness.columns import COLUMNS, FAMILIES, NO_NATIVE, WITHOUT_ADAPTERS, Column, Family, excuse
from tests.engine.correctness.page import page
from tests.engine.correctness.reference import Request
from tests.engine.correctness.subject import ADAPTERS, GREEDY, OUTPUT_TOKENS, Subject, Tiny
from tests.engine.correctness.table import BEYOND, CELLS, EXCUSED, REQUIRED, ROWS, Row
from tests.engine.native_sets import has_compiler
from tests.engine.tiny_models import VOCABULARY, prompt
from tests.reference import greedy

Load = Callable[[Column], Subject]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Tiny]:
    """A family's files and reference, made once."""
    return cache(lambda family: Tiny.build(family, tmp_path_factory.mktemp(family.name)))


@pytest.fixture(scope="module")
def load(build: Callable[[Family], Tiny]) -> Load:
    """A column's engine, loaded once."""
    return cache(lambda column: Subject.load(column, build(column.family)))


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0].name} / {cell[1].name}")
def test_f12(cell: tuple[Row, Column], load: Load) -> None:
    row, column = cell
    if column.engine.backend == "native" and not has_compiler():
        pytest.skip("no C++ compiler here")
    subject = load(column)
    with clocks.replaced_by(subject.clock):
        row.run(subject)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_text_that_is_judged_right_is_the_one_that_transformers_generates(
    family: Family, build: Callable[[Family], Tiny]
) -> None:
    references = build(family).references[WeightQuantisation.OFF]
    reference = references[""]
    request = Request(tuple(prompt(9)), GREEDY, OUTPUT_TOKENS)
    assert set(references) == {"", *([] if family.name in WITHOUT_ADAPTERS else ADAPTERS)}
    said = tuple(greedy(reference.model, request.prompt, OUTPUT_TOKENS))
    assert reference.chosen(request, said) == list(said) and max(reference.misses(request, said)) == 0.0
    changed = (*said[:5], (said[5] + 1) % VOCABULARY, *said[6:])
    assert reference.chosen(request, changed)[:6] == list(said[:6]) and reference.misses(request, changed)[5] > 0.0


def test_every_cell_is_tested_or_excused() -> None:
    tested = {(row.name, column.name) for row, column in CELLS}
    assert tested.isdisjoint(EXCUSED)
    assert tested | EXCUSED.keys() == {(row.name, column.name) for row, column in product(ROWS, COLUMNS)}
    assert len(tested) == len(CELLS)


def test_rows_show_all_that_f12_names() -> None:
    assert {row.shows for row in ROWS} - {BEYOND} == set(REQUIRED)


def test_every_situation_is_a_row() -> None:
    written = {
        value
        for module in (ends, pressure, serving)
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }
    assert written == {row.run for row in ROWS}


@pytest.mark.slow
@pytest.mark.parametrize("column", [column for column in COLUMNS if excuse(column) == NO_NATIVE], ids=lambda column: column.name)
def test_a_column_that_is_excused_can_not_be_loaded(column: Column, build: Callable[[Family], Tiny]) -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler here")
    with pytest.raises(BackendUnfit, match="backend native"):
        Subject.load(column, build(column.family))


def test_the_page_is_current() -> None:
    path = Path(__file__).parents[3] / "docs" / "correctness.md"
    assert path.read_text() == page(), "run: python -m tests.engine.correctness > docs/correctness.md"

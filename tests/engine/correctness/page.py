"""The matrix as text: in the output of a test run, and as docs/correctness.md."""

from collections.abc import Iterator, Mapping

from tests.engine.correctness.columns import COLUMNS, ENGINES, FAMILIES, Column, Comparison
from tests.engine.correctness.subject import BOUND, OUTPUT_TOKENS, SHARE_BOUND
from tests.engine.correctness.table import BEYOND, EXCUSED, ROWS, Row

HEAD = f"""# Correctness

What the engine says against a reference, situation by situation (requirement F12). Made by
`python -m tests.engine.correctness > docs/correctness.md`; a test compares. Every cell is a test of `tests/engine/correctness`,
or says why it is none; a run of those tests ends with this matrix and what came out.

The models are small and random, with weights that bfloat16 holds exactly. The reference is transformers in float32 on the same
weights, with the sampler's order version 1 written out in loops: a text is the reference's when each of its tokens is what the
reference chooses behind those before it. In each cell real members serve requests (scheduler, worker, sampler, page books, the
in-memory transport), in one process and in virtual time. Outputs have {OUTPUT_TOKENS} tokens or more where nothing ends them
before; some are greedy, some drawn with seeds, filters and penalties.

An engine that keeps its matrices as int8 is compared with the model whose matrices are what those values and scales stand for,
in float32 too: what int8 itself costs is measured by `bench.quantised`; here nothing else may be lost.
"""

COMPARISONS = {
    Comparison.REFERENCE: "All tokens, greedy and drawn, are the reference's.",
    Comparison.ALONE: "All tokens and their log-probabilities are, bit for bit, those of the request alone on the same backend.",
    Comparison.NEAR: "No more than the sentences below: sums of rows may be rounded otherwise in another batch.",
}
BOUNDS = f"""In all cells each log-probability that is told is near the reference's, and each greedy token is the reference's
best or as near to it: within {BOUND["float32"]:g} of the output's largest logit in float32, {BOUND["bfloat16"]:g} in
bfloat16. Each drawn number falls into the reference's share of its token, or is outside by at most
{SHARE_BOUND["float32"]:g} in float32, {SHARE_BOUND["bfloat16"]:g} in bfloat16.
"""


def page() -> str:
    """The whole page."""
    notes = _notes()
    parts = [HEAD, "## The matrix\n", _table(("situation", *(column.name for column in COLUMNS)), _page_rows(notes))]
    parts += [*(f"{number}. {note}" for note, number in notes.items()), ""]
    marks = ((f"`{kind.value}`", text) for kind, text in COMPARISONS.items())
    parts += [_table(("cell", "what is shown"), marks), BOUNDS]
    parts += ["## Rows\n", _table(("situation", "part of F12", "what happens"), ((r.name, r.shows, r.about) for r in ROWS))]
    parts += ["## Columns\n", _table(("model", "architecture"), ((f.name, f.about) for f in FAMILIES))]
    engines = ((e.name, e.backend, e.dtype, f"{e.page_tokens}", e.weights.value) for e in ENGINES)
    parts += [_table(("engine", "backend", "dtype", "tokens in a page", "weight_quantisation"), engines)]
    parts += ["The native backend computes in bfloat16 only, so it has no column in float32. Rows that F12 does not name"]
    parts += [f"are marked as {BEYOND}.\n"]
    return "\n".join(parts).rstrip("\n") + "\n"


def lines(results: Mapping[tuple[str, str], str]) -> list[str]:
    """One line for each row, with the results of cells by the names of row and column; "" for one that did not run."""
    notes, width = _notes(), max(len(row.name) for row in ROWS)
    groups = "".join(f"{family.name:<{5 * len(ENGINES)}}" for family in FAMILIES)
    found = [f"{'':{width}}  {groups}", f"{'':{width}}  " + "".join(f"{column.engine.name:<5}" for column in COLUMNS)]

    def cell(row: Row, column: Column) -> str:
        why = EXCUSED.get((row.name, column.name))
        return results.get((row.name, column.name), "") if why is None else f"- {notes[why]}"

    found += [f"{row.name:{width}}  " + "".join(f"{cell(row, column):<5}" for column in COLUMNS) for row in ROWS]
    return [line.rstrip() for line in (*found, *(f"{number}: {note}" for note, number in notes.items()))]


def _notes() -> dict[str, int]:
    return {note: number for number, note in enumerate(dict.fromkeys(EXCUSED.values()), 1)}


def _page_rows(notes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    for row in ROWS:
        reasons = (EXCUSED.get((row.name, column.name)) for column in COLUMNS)
        marks = zip(COLUMNS, reasons, strict=True)
        yield (row.name, *(f"– ({notes[why]})" if why else column.engine.comparison.value for column, why in marks))


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    found = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*found, *(f"| {' | '.join(row)} |" for row in rows), ""])

"""The matrix of requirement F12: situations down, engines across. Each cell has a test or says why there is none."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from tests.engine.correctness import ends, pressure, serving
from tests.engine.correctness.columns import COLUMNS, WITHOUT_ADAPTERS, Column, excuse
from tests.engine.correctness.subject import Subject

#: What F12 names, in its order; dtypes are columns.
REQUIRED = (
    "single request",
    "mixed lengths",
    "prefix hit and miss",
    "allocate/free/preempt",
    "chunk mixes",
    "branches",
    "cancel",
    "timeout",
    "out of memory",
    "restart",
    "fixed-seed replay",
)
#: Of rows beyond what F12 names.
BEYOND = "beyond F12"


@dataclass(frozen=True, slots=True)
class Row:
    """One situation. `shows`: which part of F12; `run` judges it in one column."""

    name: str
    shows: str
    about: str
    run: Callable[[Subject], None]


ROWS = (
    Row("single request", "single request", "One request at a time, greedy and drawn.", serving.single),
    Row(
        "mixed lengths",
        "mixed lengths",
        "Five prompts of lengths at, below and above page borders in one batch; greedy and drawn rows share its steps.",
        serving.mixed_lengths,
    ),
    Row(
        "prefix miss",
        "prefix hit and miss",
        "The prefix cache has the same text of another tenant, and one that differs in its first token: nothing is found.",
        serving.prefix_miss,
    ),
    Row(
        "prefix hit",
        "prefix hit and miss",
        "Pages are shared with a sequence that runs, taken from one that ended, and hold generated tokens.",
        serving.prefix_hit,
    ),
    Row(
        "chunk mixes",
        "chunk mixes",
        "Prompts in chunks of many sizes, in steps that have decode rows of others too.",
        serving.chunk_mixes,
    ),
    Row(
        "pages reused",
        "allocate/free/preempt",
        "Requests follow one another on the same few pages, all of which were full of NaN at first.",
        pressure.pages_reused,
    ),
    Row(
        "preempted: recompute",
        "allocate/free/preempt",
        "Too few pages for all: sequences lose theirs three times or more, and what was in them is computed again; drawn"
        " outputs go on at the same place of their seed (case B45).",
        pressure.preempted_by_recompute,
    ),
    Row(
        "preempted: swap",
        "allocate/free/preempt",
        "The same, and what was in the pages goes to the host and comes back.",
        pressure.preempted_by_swap,
    ),
    Row(
        "branches",
        "branches",
        "Four outputs of one prompt (n > 1) share its full pages and have copies of the last one; each is what it is alone.",
        serving.branches,
    ),
    Row(
        "cancel",
        "cancel",
        "A client's cancel in the middle of one output and of one prompt; neighbours and who comes later are not touched.",
        ends.cancelled,
    ),
    Row(
        "deadline",
        "timeout",
        "The overall clock runs out in the middle of one output, the first-token clock in the middle of a prompt.",
        ends.deadline,
    ),
    Row(
        "out of pages",
        "out of memory",
        "What does not fit beside others is refused and served later; what can never fit is refused.",
        pressure.out_of_pages,
    ),
    Row(
        "out of memory in a step",
        "out of memory",
        "A step fails: its sequences end with model_error, one that was not in it goes on, later requests are served.",
        pressure.out_of_memory,
    ),
    Row(
        "restart",
        "restart",
        "A member is lost; another one, with the weights loaded anew, goes on from prompts and tokens so far.",
        ends.restart,
    ),
    Row(
        "replay alone",
        "fixed-seed replay",
        "The same seeded request again, later, and on weights loaded anew.",
        serving.replay_alone,
    ),
    Row(
        "replay in a batch",
        "fixed-seed replay",
        "The same seeded request as the last of a batch that runs, twice at once (case B45).",
        serving.replay_in_batch,
    ),
    Row(
        "hand-over",
        BEYOND,
        "A prefill engine computes prompts in chunks and writes pages and last logits into a decode engine that is at work.",
        ends.handed_over,
    ),
    Row(
        "move",
        BEYOND,
        "A sequence stands still within its output, its pages are written into another decode engine; it goes on there.",
        ends.moved,
    ),
    Row(
        "speculation",
        BEYOND,
        "Drafts by prompt lookup, some right and some wrong.",
        serving.speculation,
    ),
    Row(
        "draft model",
        BEYOND,
        "Another load of the same weights drafts, in pages of its own, for sequences with a grammar and without.",
        serving.draft_model,
    ),
    Row(
        "structured output",
        BEYOND,
        "A regular expression masks ids, beside a sequence without one.",
        serving.structured,
    ),
    Row(
        "adapters",
        BEYOND,
        "Sequences of two LoRA adapters and of none share their steps, chunks and decode rows; the reference has merged weights.",
        serving.adapters,
    ),
    Row(
        "adapters: prefixes",
        BEYOND,
        "One text of the base model and of two adapters: each finds its own pages in the prefix cache, and none of the others.",
        serving.adapters_prefixes,
    ),
    Row(
        "adapters: preempted",
        BEYOND,
        "Too few pages for all: what sequences of adapters lose is computed again with their own.",
        pressure.adapters_preempted,
    ),
    Row(
        "adapters: elsewhere",
        BEYOND,
        "Sequences of adapters are handed over, moved, and go on in another member after theirs is lost.",
        ends.adapters_elsewhere,
    ),
    Row(
        "structured output with drafts",
        BEYOND,
        "Drafts by prompt lookup behind tokens that a regular expression masks, each with a mask of its own.",
        serving.structured_drafts,
    ),
)

NO_ADAPTERS = (
    "attention over latent vectors is made of multiplied weights, which no adapter can change; such a member does not start"
)


def _why_not(row: Row, column: Column) -> str:
    """Why a cell has no test; empty when it has one."""
    if reason := excuse(column):
        return reason
    return NO_ADAPTERS if column.family.name in WITHOUT_ADAPTERS and row.name.startswith("adapters") else ""


#: Row's and column's name -> why that cell has no test.
EXCUSED = {(row.name, column.name): why for row, column in product(ROWS, COLUMNS) if (why := _why_not(row, column))}
#: The cells that are tested.
CELLS = tuple((row, column) for row, column in product(ROWS, COLUMNS) if (row.name, column.name) not in EXCUSED)

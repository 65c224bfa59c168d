"""Cells of real processes, one for each setting that tests share. Starting one takes seconds, so they live for the session."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from models import DEFAULT_MODEL
from tandem_cli.cell import Cell, CellOptions, running_cell
from tests.exact_dtype import EXACT_DTYPE
from tests.otlp_collector import OtlpCollector, collecting
from tests.reference import default_model

#: Context of the e2e cells: small enough that its limit can be reached in a test.
CONTEXT_TOKENS = 1024
STEP_TOKENS = 128


@contextmanager
def cell_of(**options: object) -> Iterator[Cell]:
    """A cell of the default model; the processes' logs go away with it unless something failed to start."""
    default_model()
    extra = (
        ("prefill", f"--context-tokens={CONTEXT_TOKENS}"),
        ("decode", f"--context-tokens={CONTEXT_TOKENS}"),
        ("prefill", f"--max-step-tokens={STEP_TOKENS}"),
        ("prefill", "--handover-checksums"),
        ("decode", "--handover-checksums"),
        *options.pop("extra", ()),
    )
    settings = {"model": DEFAULT_MODEL, "listen": "127.0.0.1:0", "kv_tokens": 16_384, "log_level": "warning", "extra": extra}
    with (
        tempfile.TemporaryDirectory(prefix="tandem-e2e-") as folder,
        running_cell(CellOptions(**{**settings, **options}), Path(folder)) as cell,
    ):
        yield cell


@pytest.fixture(scope="session")
def exact_cell() -> Iterator[Cell]:
    """Two routers with HTTP doors, one prefill and one decode member, where a request says the same in whatever company."""
    with cell_of(dtype=EXACT_DTYPE, routers=2, http="127.0.0.1:0") as cell:
        yield cell


@pytest.fixture(scope="session")
def f32_cell() -> Iterator[Cell]:
    """One router, one prefill and one decode member in float32, to be compared with the reference."""
    with cell_of(dtype="float32") as cell:
        yield cell


@pytest.fixture(scope="module")
def bf16_cell() -> Iterator[Cell]:
    """One router, one prefill and one decode member in bfloat16."""
    with cell_of(dtype="bfloat16") as cell:
        yield cell


@dataclass(frozen=True, slots=True)
class Observed:
    """A cell that tells everything it can: all log lines, and every span to a collector."""

    cell: Cell
    collector: OtlpCollector


@pytest.fixture(scope="session")
def observed() -> Iterator[Observed]:
    """One router, one prefill and one decode member."""
    with pytest.MonkeyPatch.context() as environment, collecting() as collector:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds: nobody wants to wait for the usual 5 s
        with cell_of(otlp_endpoint=collector.endpoint, log_level="debug", kv_tokens=4096) as cell:
            yield Observed(cell, collector)

"""Collects what came out of each cell, and prints the matrix at the end of a run that had any."""

from collections.abc import Generator

import pytest

from tests.engine.correctness.page import lines

_RESULTS = pytest.StashKey[dict[tuple[str, str], str]]()
_WORDS = {"passed": "ok", "failed": "FAIL", "skipped": "skip"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    cell = item.callspec.params.get("cell") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    if cell is not None and (report.when == "call" or not report.passed):
        row, column = cell
        item.config.stash.setdefault(_RESULTS, {})[row.name, column.name] = _WORDS[report.outcome]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    results = config.stash.get(_RESULTS, {})
    if results:
        terminalreporter.section("correctness: what the engine says against the reference")
        for line in lines(results):
            terminalreporter.write_line(line)

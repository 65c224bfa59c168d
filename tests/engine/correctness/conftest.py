"""Collects what came out of each cell, and prints the matrix at the end of a run that had any."""

from collections.abc import Generator

import pytest

from tests.engine.correctness.page import lines

_CELL = "correctness cell"
_WORDS = {"passed": "ok", "failed": "FAIL", "skipped": "skip"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    cell = item.callspec.params.get("cell") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    if cell is not None and (report.when == "call" or not report.passed):
        row, column = cell
        # With the report, which goes to the process that prints where tests run in several.
        report.user_properties.append((_CELL, [row.name, column.name]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    results: dict[tuple[str, str], str] = {}
    for outcome, word in _WORDS.items():
        for report in terminalreporter.stats.get(outcome, ()):
            results.update({(value[0], value[1]): word for name, value in report.user_properties if name == _CELL})
    if results:
        terminalreporter.section("correctness: what the engine says against the reference")
        for line in lines(results):
            terminalreporter.write_line(line)

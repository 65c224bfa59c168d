"""`tandem doctor` and `tandem bench` against a cell of real processes, and the doctor's own measurements."""

import asyncio
import json
import sys
from typing import Any

import msgspec
import pytest

from tandem_cli.cell import Cell
from tandem_cli.cell_file import find_cell
from tandem_cli.doctor import told
from tandem_cli.doctor.child import measured
from tests.e2e.cells import at_rest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUN_S = 200.0


async def command(*arguments: str) -> tuple[int, Any]:
    """Exit status of `tandem … --json`, and what it printed: a list of JSON lines."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tandem_cli", *arguments, "--json", stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), RUN_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not err, err.decode()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in out.splitlines()]


async def test_a_running_cell_is_found_and_called_fit(exact_cell: Cell) -> None:
    assert find_cell(exact_cell.address) is not None
    code, (told_,) = await command("doctor", "--router", exact_cell.address)
    found = {one["check"]: one for one in told_["findings"]}
    failed = [one for one in told_["findings"] if one["result"] == "fails"]
    assert (code, failed) == (0, [])
    for check in ("same model", "same page layout", "same version", "leases", "store", "store rights", "request", "router clock"):
        assert check in found, found.keys()
    assert found["leases"]["finding"].startswith("2 alive")
    await at_rest(exact_cell)


async def test_a_cell_that_is_not_there_fails_with_1() -> None:
    code, (told_,) = await command("doctor", "--router", "127.0.0.1:1", "--no-request")
    assert code == 1 and told_["counts"]["fails"] == 1


async def test_load_is_measured_cancelled_and_split(exact_cell: Cell) -> None:
    arguments = ("--router", exact_cell.address, "--concurrency", "1,3", "--input", "24", "--output", "6", "--requests", "4")
    code, (one, three) = await command("bench", *arguments, "--cancel-share", "0.5", "--warm-up", "1", "--profile")
    assert code == 0
    for made in (one, three):
        assert made["failures"] == {} and made["requests"] == 4 == made["ended"] + made["cancelled"]
        assert 0 < made["first_token_ms"]["p50"] <= made["first_token_ms"]["p99"]
        assert made["output_tokens_per_s"] > 0
    assert one["cancelled"] + three["cancelled"] > 0
    parts = {row["part of a decode step"] for row in three["profile"][0]["rows"]}
    assert {"plan", "model", "sample", "text", "publish", "**the step**"} <= parts
    phases = [next(iter(row.values())) for row in three["profile"][-1]["rows"]]
    assert phases[:2] == ["check", "queue"] and "send" in phases
    await at_rest(exact_cell)


async def test_load_that_can_not_fit_is_refused_before_it_begins(exact_cell: Cell) -> None:
    code, lines = await command("bench", "--router", exact_cell.address, "--input", "1000", "--output", "100")
    assert code == 2 and "1100 tokens" in lines[-1]["error"]["message"] and "1024" in lines[-1]["error"]["message"]


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_bytes_really_travel_between_two_processes(transport: str) -> None:
    found = measured(told.Transfer, ["kv_transfer.doctor", "--transport", transport, "--mebibytes", "1"], RUN_S)
    assert transport == "cma" or found.problem == ""
    assert found.problem or (found.writes >= 1 and found.bytes_per_s > 1e5 and found.connect_s > 0)


def test_a_device_that_is_not_there_is_told() -> None:
    found = measured(told.Transfer, ["kv_transfer.doctor", "--net-devices", "nosuch0"], RUN_S)
    assert "nosuch0" in found.problem and found.bytes_per_s == 0.0


def test_the_engine_says_what_computes() -> None:
    found = measured(told.Engine, ["engine.doctor", "--dtype", "float32"], RUN_S)
    assert found.backend in ("native", "torch") and "plain" in found.instruction_sets
    assert msgspec.to_builtins(found)["check_s"] > 0

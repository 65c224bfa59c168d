"""`tandem top` as a program uses it, on a cell of real processes."""

import asyncio
import json
import signal
from typing import Any

import pytest

from tandem_cli.cell import Cell
from tandem_cli.exits import Exit
from tests.e2e.cells import ask, at_rest, greedy_request, read, stub_of
from tests.e2e.test_cli import command, rest_of, run
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def views(cell: Cell, *options: str, router: int = 0) -> dict[str, Any]:
    """One view as JSON."""
    done = await run("top", "--once", "--json", "--address", cell.routers[router].address, *options)
    assert (done.code, done.err) == (Exit.OK, "")
    return json.loads(done.out)


async def test_once_tells_members_pages_and_requests(exact_cell: Cell) -> None:
    async with stub_of(exact_cell) as stub:
        request = greedy_request(range(100, 140), 950)
        call = stub.Generate(request, timeout=120)
        await read(call, up_to="delta")
        view = await views(exact_cell)
        assert [(pool["role"], [one["state"] for one in pool["members"]]) for pool in view["pools"]] == [
            ("prefill", ["MEMBER_STATE_READY"]),
            ("decode", ["MEMBER_STATE_READY"]),
        ]
        for pool in view["pools"]:
            (member,) = pool["members"]
            assert sum(member["pages"].values()) >= 1000, "16384 tokens in pages of 16"
        (running,) = [one for one in view["requests"] if one["request_id"] == request.request_id]
        assert running["stage"] == "REQUEST_STAGE_DECODE" and running["output_tokens"] > 0
        assert view["pools"][1]["members"][0]["pages"]["owned"] > 0
        assert [budget["used"] for budget in view["budgets"] if budget["resource"] == "pages"] != ["0"]
        assert len(view["routers"]) == 2
        other = await views(exact_cell, router=1)
        assert request.request_id not in {one["request_id"] for one in other["requests"]}
        call.cancel()
        done = await ask(stub, greedy_request(range(100, 120), 4))
        assert done.completed is not None

        async def both_ended() -> bool:
            ended = (await views(exact_cell, "--ended", "2"))["ended"]
            return {one["finish_reason"] for one in ended} == {"FINISH_REASON_CANCELLED", "FINISH_REASON_MAX_OUTPUT_TOKENS"}

        await until(both_ended, 30.0, "the ends of both are told")
    await at_rest(exact_cell)


async def test_a_line_each_period_until_a_signal(exact_cell: Cell) -> None:
    async with command("top", "--json", "--period", "0.2", "--address", exact_cell.address) as process:
        assert process.stdout is not None
        lines = [json.loads(await asyncio.wait_for(process.stdout.readline(), 60)) for _ in range(3)]
        assert len({line["at"] for line in lines}) == 3
        process.send_signal(signal.SIGINT)
        assert (await rest_of(process)).code == Exit.OK
    await at_rest(exact_cell)


async def test_text_for_people(exact_cell: Cell) -> None:
    done = await run("top", "--once", "--address", exact_cell.address)
    assert done.code == Exit.OK and done.out.startswith("tandem top")
    assert "decode-0" in done.out and "pages of decode-0" in done.out


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--period", "0.1"), Exit.BAD_INPUT, "period: must be 0.2 s to 60 s"),
        (("--requests", "1001"), Exit.BAD_INPUT, "max_requests: must be 0 to 1000"),
        (("--requests", "-1"), Exit.BAD_INPUT, "must be 0 or more"),
    ],
)
async def test_bad_bounds_are_named(exact_cell: Cell, options: tuple[str, ...], code: Exit, words: str) -> None:
    done = await run("top", "--once", "--address", exact_cell.address, *options)
    assert (done.code, done.out) == (code, "") and words in done.err


async def test_no_router_is_said() -> None:
    done = await run("top", "--once", "--json", "--address", "127.0.0.1:1")
    assert done.code == Exit.UNREACHABLE and done.lines[-1]["error"]["exit_code"] == Exit.UNREACHABLE

"""The tandem command as its users run it: real processes, real pipes, real signals."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem_cli.cell import Cell
from tandem_cli.exits import Exit
from tests.e2e.cells import at_rest, fresh_id
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RUN_S = 60.0
START_S = 120.0
PROMPT = "Name three rivers."
GREEDY = ("--temperature", "0", "-n", "8")
ENDLESS = ("--ignore-eos", "--temperature", "0", "-n", "900")
#: Small and quick to start; the answers are not looked at.
UP = ("up", "--json", "--listen", "127.0.0.1:0", "--kv-tokens", "2048", "--context-tokens", "1024")


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


@asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running command, which is gone after the block."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tandem_cli", *arguments, stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def rest_of(process: asyncio.subprocess.Process, stdin: bytes | None = None) -> Ran:
    """Read a command to its end."""
    out, err = await asyncio.wait_for(process.communicate(stdin), RUN_S)
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


async def run(*arguments: str, stdin: bytes = b"") -> Ran:
    """Run a command to its end."""
    async with command(*arguments) as process:
        return await rest_of(process, stdin)


async def record_of(cell: Cell, request_id: str) -> dict[str, Any]:
    """The record of an ended request, as `tandem get --json` shows it."""
    records: list[dict[str, Any]] = []

    async def ended() -> bool:
        found = await run("get", request_id, "--address", cell.address, "--json")
        records.append(found.lines[0])
        return records[-1]["state"].removeprefix("REQUEST_STATE_") in ("FINISHED", "CANCELLED", "FAILED")

    await until(ended, RUN_S, f"the end of {request_id}")
    return records[-1]


async def test_the_same_text_in_every_form(exact_cell: Cell) -> None:
    at = ("--address", exact_cell.address)
    text, piped, events, final, quiet = await asyncio.gather(
        run("generate", *at, *GREEDY, PROMPT),
        run("generate", *at, *GREEDY, "-", stdin=f"{PROMPT}\n".encode()),
        run("generate", *at, *GREEDY, "--json", PROMPT),
        run("generate", *at, *GREEDY, "--final-only", PROMPT),
        run("generate", *at, *GREEDY, "--quiet", stdin=PROMPT.encode()),
    )
    assert [ran.code for ran in (text, piped, events, final, quiet)] == [Exit.OK] * 5, text.err
    assert text.out.strip() and text.out.endswith("\n")
    assert text.out == piped.out == final.out == quiet.out
    assert "max_output_tokens" in text.err and "tokens/s" in text.err and "prompt computed" in text.err
    assert quiet.err == ""
    started, *deltas, completed = events.lines
    assert started["started"]["request_id"].startswith("cli-")
    assert "".join(event["delta"]["text"] for event in deltas) == text.out.removesuffix("\n")
    assert completed["completed"]["finish_reason"] == "FINISH_REASON_MAX_OUTPUT_TOKENS"
    assert [event["sequence_no"] for event in events.lines] == [str(number) for number in range(len(events.lines))]


async def test_exit_statuses(exact_cell: Cell) -> None:
    at = ("--address", exact_cell.address)
    cases = {
        ("generate", *at, "--temperature", "-1", "x"): (Exit.BAD_INPUT, "sampling.temperature"),
        ("generate", *at, "--seed", "-1", "x"): (Exit.BAD_INPUT, "seed"),
        ("generate", *at): (Exit.BAD_INPUT, "no prompt"),
        ("generate", *at, "--model", "nobody", "x"): (Exit.NOT_FOUND, "nobody"),
        ("generate", *at, *ENDLESS, "--timeout-s", "0.5", "--quiet", "x"): (Exit.DEADLINE, "deadline_exceeded"),
        ("get", *at, "never-seen"): (Exit.NOT_FOUND, "never-seen"),
        ("generate", "--address", "127.0.0.1:1", "x"): (Exit.UNREACHABLE, "No router answers at 127.0.0.1:1"),
        ("models", "pull", "nobody"): (Exit.NOT_FOUND, "nobody"),
        ("up", "--listen", "nowhere"): (Exit.BAD_INPUT, "host:port"),
        ("up", "--listen", exact_cell.address): (Exit.FAILED, f"cannot listen on {exact_cell.address}"),
        ("up", "--set", "nobody.x=1"): (Exit.BAD_INPUT, "ROLE.SETTING=VALUE"),
        ("up", "--listen", "127.0.0.1:0", "--set", "router.queue_requests=0"): (Exit.BAD_INPUT, "flag --queue-requests is '0'"),
    }
    answers = await asyncio.gather(*(run(*arguments) for arguments in cases))
    wrong = [
        (arguments, answer)
        for (arguments, (code, words)), answer in zip(cases.items(), answers, strict=True)
        if answer.code != code or words not in answer.err or "Traceback" in answer.err
    ]
    assert not wrong
    not_utf8 = await run("generate", *at, stdin=b"half \xc3")
    assert not_utf8.code == Exit.BAD_INPUT and "byte 5" in not_utf8.err
    told = await run("generate", *at, "--json", "--temperature", "-1", "x")
    assert told.code == Exit.BAD_INPUT and told.err == ""
    error = told.lines[-1]["error"]
    assert error["exit_code"] == Exit.BAD_INPUT and error["status"] == "INVALID_ARGUMENT"
    assert [one["field"] for one in error["violations"]] == ["sampling.temperature"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_cancels_the_request_and_shows_its_end(exact_cell: Cell, number: int) -> None:
    name = fresh_id("interrupted")
    async with command("generate", "--address", exact_cell.address, "--request-id", name, *ENDLESS, PROMPT) as process:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readexactly(1), RUN_S)
        process.send_signal(number)
        ended = await rest_of(process)
    assert ended.code == Exit.CANCELLED
    assert "Ctrl-C again quits" in ended.err and "cancelled" in ended.err and "cancel effective after" in ended.err
    record = await record_of(exact_cell, name)
    assert record["state"] == "REQUEST_STATE_CANCELLED" and record["cancel_reason"] == "interrupted at the terminal"
    await at_rest(exact_cell)


async def test_a_second_ctrl_c_quits_although_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        async with command("generate", "--address", address, PROMPT) as process:
            assert process.stderr is not None
            accepted, _ = await asyncio.wait_for(asyncio.to_thread(mute.accept), RUN_S)
            with accepted:
                process.send_signal(signal.SIGINT)
                await asyncio.wait_for(process.stderr.readuntil(b"quits at once"), RUN_S)
                process.send_signal(signal.SIGINT)
                assert (await rest_of(process)).code == Exit.CANCELLED


async def test_a_reader_that_leaves_ends_the_request(exact_cell: Cell) -> None:
    name = fresh_id("left")
    process = await asyncio.create_subprocess_shell(
        f'"{sys.executable}" -m tandem_cli generate --address {exact_cell.address} --request-id {name} {" ".join(ENDLESS)} x '
        "| head -c 1 | wc -c; exit ${PIPESTATUS[0]}",
        executable="/bin/bash",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    ended = await rest_of(process)
    assert ended.code == Exit.PIPE_CLOSED and ended.out.strip() == "1" and ended.err == ""
    record = await record_of(exact_cell, name)
    assert record["state"] == "REQUEST_STATE_CANCELLED"
    await at_rest(exact_cell)


async def test_cancel_get_and_models(exact_cell: Cell) -> None:
    name, at = fresh_id("early"), ("--address", exact_cell.address)
    cancelled = await run("cancel", name, *at, "--reason", "changed my mind")
    assert (cancelled.code, cancelled.out) == (Exit.OK, "accepted, id not seen yet\n")
    generated, served, listed = await asyncio.gather(
        run("generate", *at, "--request-id", name, PROMPT),
        run("models", "served", *at, "--json"),
        run("models", "list", "--json"),
    )
    assert generated.code == Exit.CANCELLED and generated.out == ""
    shown, again = await asyncio.gather(run("get", name, *at), run("cancel", name, *at, "--json"))
    assert name in shown.out and "changed my mind" in shown.out and "cancel_requested" in shown.out
    assert again.lines[0]["outcome"] == "CANCEL_OUTCOME_ALREADY_ENDED"
    (model,) = served.lines[0]
    assert (model["prefill_members"], model["decode_members"]) == (1, 1)
    assert model["name"] in {ref["name"] for ref in json.loads(listed.out)}


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@dataclass(frozen=True, slots=True)
class Up:
    """What `tandem up` said when it was ready."""

    process: asyncio.subprocess.Process
    address: str
    logs: Path
    pids: dict[str, int]
    store: Path

    async def nothing_left(self) -> bool:
        """No process, no folder."""
        return all(map(is_gone, self.pids.values())) and not self.logs.exists() and not self.store.exists()


@asynccontextmanager
async def up(*arguments: str) -> AsyncIterator[Up]:
    """A ready `tandem up`."""
    async with command(*UP, *arguments) as process:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        ready = json.loads(line)
        assert ready["event"] == "ready", line
        processes = {child["name"]: child for child in ready["processes"]}
        store = Path(processes["store"]["url"].removeprefix("unix://")).parent
        pids = {name: child["pid"] for name, child in processes.items()}
        cell = Up(process, ready["address"], Path(ready["logs"]), pids, store)
        assert cell.logs.is_dir() and cell.store.is_dir() and not any(map(is_gone, pids.values()))
        yield cell


async def test_ctrl_c_ends_up_while_it_starts() -> None:
    async with command("up", "--listen", "127.0.0.1:0") as process:
        assert process.stderr is not None
        await asyncio.wait_for(process.stderr.readuntil(b"loading the model: prefill-0, decode-0"), START_S)
        process.send_signal(signal.SIGINT)
        ended = await rest_of(process)
    assert ended.code == Exit.OK and "stopped by Ctrl-C; nothing is left running" in ended.err and "Traceback" not in ended.err


async def test_up_serves_and_stops_cleanly_on_sigterm() -> None:
    async with up() as cell:
        assert set(cell.pids) == {"router-0", "prefill-0", "decode-0", "store"}
        answer = await run("generate", "--address", cell.address, *GREEDY, PROMPT)
        assert answer.code == Exit.OK and answer.out.strip()
        cell.process.terminate()
        ended = await rest_of(cell.process)
        assert ended.code == Exit.OK and ended.err == ""
        assert ended.lines == [{"event": "stopping"}, {"event": "stopped", "killed": []}]
        assert await cell.nothing_left()


async def test_nothing_outlives_a_killed_up() -> None:
    async with up("--prefill", "0") as cell:
        cell.process.kill()
        await until(cell.nothing_left, 30.0, "every process and folder gone")


async def test_up_names_the_process_that_died_and_stops_the_others() -> None:
    async with up("--prefill", "0") as cell:
        os.kill(cell.pids["decode-0"], signal.SIGKILL)
        ended = await rest_of(cell.process)
        assert ended.code == Exit.FAILED
        assert ended.lines[-1]["error"]["message"].startswith("decode-0 was killed by SIGKILL by itself; the end of its log:\n")
        assert await cell.nothing_left()

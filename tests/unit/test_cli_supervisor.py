"""The supervisor: readiness, ends by itself, the order of a stop, and a folder that goes with the last process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_cli.log_tail import LINES, plain_lines, tail
from tandem_cli.run_folder import run_folder
from tandem_cli.supervisor import CellFailed, Child, StopOrder, Supervisor
from tests.waiting import until

READY_S = 20.0
AT_ONCE = StopOrder(0, READY_S)
MODULE = "tests.unit.cli_child"


def exists(folder: str) -> bool:
    return os.path.isdir(folder)


def test_a_stop_goes_by_rank_and_kills_what_does_not_end(tmp_path: Path) -> None:
    said = tmp_path / "said"
    seen: list[str] = []
    with Supervisor(tmp_path, stopping=lambda: seen.append("stopping")) as supervisor:
        children = [
            supervisor.spawn(name, [MODULE, "writes", str(said), name], StopOrder(rank, READY_S))
            for name, rank in (("store", 2), ("member", 1), ("router", 0))
        ]
        children.append(supervisor.spawn("stubborn", [MODULE, "stubborn"], StopOrder(1, 0.2)))
        supervisor.wait_ready(children, READY_S, lambda child: seen.append(child.name))
        assert sorted(seen) == ["member", "router", "store", "stubborn"]
        assert children[3].address == "stubborn:1"
        supervisor.check()
    assert seen[-1] == "stopping"
    assert said.read_text().split() == ["router", "member", "store"]
    assert supervisor.killed == ["stubborn"]
    assert [child.process.returncode for child in children] == [0, 0, 0, -signal.SIGKILL]


def test_an_end_before_ready_shows_the_log(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.spawn("decode-0", [MODULE, "fails"], AT_ONCE)
        with pytest.raises(CellFailed) as failed:
            supervisor.wait_ready([child], READY_S)
    assert str(failed.value) == (
        "decode-0 ended with code 3 before it was ready; the end of its log:\n  03:04:05.678 ERROR no such model"
    )


def test_a_process_that_ends_by_itself_is_named(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.spawn("decode-0", [MODULE, "waits"], AT_ONCE)
        supervisor.wait_ready([child], READY_S)
        child.process.kill()
        child.process.wait(READY_S)
        with pytest.raises(CellFailed, match=r"^decode-0 was killed by SIGKILL by itself; .*\n  \(it wrote nothing\)$"):
            supervisor.check()


def test_one_that_is_never_ready_is_named(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.spawn("slow", [MODULE, "silent"], AT_ONCE)
        with pytest.raises(CellFailed, match=r"^slow was not ready after 0 s"):
            supervisor.wait_ready([child], 0.0)


def test_kill_ends_everything_at_once(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        children = [supervisor.spawn(name, [MODULE, "stubborn"], AT_ONCE) for name in ("a", "b")]
        supervisor.wait_ready(children, READY_S)
        supervisor.kill()
    assert supervisor.killed == []  # by the stop: they were gone by then
    assert all(child.process.returncode == -signal.SIGKILL for child in children)


def test_a_child_of_another_parent_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem_cli.child", str(os.getppid()), MODULE, "waits"], check=False, timeout=READY_S
    )
    assert done.returncode == 128 + signal.SIGTERM


#: A supervisor that is killed; what it started reads the descriptor of its argument to the end.
KILLED = """
import os, signal, subprocess, sys
from tandem_cli.run_folder import run_folder
with run_folder() as folder:
    subprocess.Popen(["cat"], stdin=int(sys.argv[1]), stdout=subprocess.DEVNULL, pass_fds=(folder.lifeline,))
    print(folder.path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
async def test_the_folder_goes_with_the_last_process_that_holds_its_lifeline() -> None:
    reader, writer = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(reader), stdout=asyncio.subprocess.PIPE, pass_fds=(reader,)
    )
    os.close(reader)
    said, _ = await asyncio.wait_for(process.communicate(), READY_S)
    folder = said.decode().strip()
    assert process.returncode == -signal.SIGKILL and exists(folder)
    os.close(writer)

    async def gone() -> bool:
        return not exists(folder)

    await until(gone, READY_S, "the folder gone")


def test_a_kept_folder_stays(tmp_path: Path) -> None:
    with run_folder(tmp_path / "new" / "logs") as folder:
        (folder.path / "router-0.log").write_text("x")
    assert (tmp_path / "new" / "logs" / "router-0.log").exists() and folder.lifeline is None


def test_how_a_child_ended(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    process.wait(READY_S)
    assert Child("x", process, tmp_path, -1, AT_ONCE).how_it_ended() == "ended with code 7"


def test_log_lines_for_people(tmp_path: Path) -> None:
    assert plain_lines("plain") == ["plain"]
    assert plain_lines("[1]") == ["[1]"]
    entry = {"timestamp": "2026-01-02T03:04:05.678Z", "level": "ERROR", "message": "broke", "exception": "Trace\n  Error"}
    line = json.dumps(entry)
    assert plain_lines(line) == ["03:04:05.678 ERROR broke", "Trace", "  Error"]
    log = tmp_path / "x.log"
    log.write_text("".join(f"{number}\n" for number in range(100)))
    assert tail(log).split() == [str(number) for number in range(100 - LINES, 100)]
    assert tail(tmp_path / "none") == "(the log cannot be read: No such file or directory)"

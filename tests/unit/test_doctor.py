"""What the doctor makes of facts; that what it measures with is really there; and its children's words."""

import dataclasses
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.doctor import EngineFindings
from kv_transfer.doctor import TransferFindings
from router.doctor import StoreDoctorSettings, StoreFindings, look
from router.embedded import EmbeddedServer
from tandem.pools.v1 import member_pb2
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell_file import CellFile, Process, find_cell, process_of, write_cell_file
from tandem_cli.doctor import cell_judged, machine, machine_judged, told, told_judged
from tandem_cli.doctor.cell import Answered, MemberSeen, ProcessSeen, RouterSeen
from tandem_cli.doctor.child import ChildFailed, measured
from tandem_cli.doctor.finding import Finding, Result, any_fails
from tandem_cli.doctor.packages import compare

GIB = 1024**3
PLAN = machine_judged.Plan(members=2, threads=1, weight_bytes=GIB, kv_bytes=GIB)
MEMORY = machine.Memory(available=32 * GIB, limit_left=None, shm_free=GIB)
CPUS = machine.Cpus("a CPU", 4, None, "")
INFO = {
    "redis_version": "7.2.4",
    "role": "master",
    "maxmemory": str(GIB),
    "used_memory": "1000",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "1",
    "connected_slaves": "0",
}
STORE = told.Store("", INFO, (), 0.0002, 0.001, 0.0, 0.0001, {"router-0:a": 4.0})


def results(findings: list[Finding]) -> dict[str, Result]:
    return {one.check: one.result for one in findings}


@pytest.mark.parametrize(
    ("memory", "result"),
    [
        (MEMORY, Result.OK),
        (replace(MEMORY, available=6 * GIB), Result.WARNING),
        (replace(MEMORY, available=4 * GIB), Result.FAILS),
        (replace(MEMORY, limit_left=2 * GIB), Result.FAILS),
    ],
)
def test_memory_is_what_is_left_of_the_machine_or_of_its_cgroup(memory: machine.Memory, result: Result) -> None:
    found = machine_judged.judge_memory(memory, PLAN)
    assert found.result is result and "5.2 GiB" in found.finding
    assert ("cgroup" in found.finding) == (memory.limit_left is not None)
    assert bool(found.change) == (result is not Result.OK)


def test_threads_are_held_against_cores_and_quota() -> None:
    assert machine_judged.judge_cpus(CPUS, PLAN).result is Result.OK
    assert machine_judged.judge_cpus(replace(CPUS, quota=1.5), PLAN).result is Result.WARNING
    told_too_many = machine_judged.judge_cpus(replace(CPUS, omp_threads="16"), PLAN)
    assert told_too_many.result is Result.WARNING and "OMP_NUM_THREADS=4" in told_too_many.change


def test_limits_of_the_system_name_what_to_set() -> None:
    limits = machine.Limits(open_files=512, locked_bytes=8 * 1024**2, pids_left=10)
    assert machine_judged.judge_open_files(limits).result is Result.FAILS
    assert machine_judged.judge_open_files(replace(limits, open_files=2048)).result is Result.WARNING
    assert machine_judged.judge_open_files(replace(limits, open_files=None)).result is Result.OK
    assert machine_judged.judge_locked_memory(limits, []).result is Result.OK
    assert machine_judged.judge_locked_memory(limits, ["mlx5_0"]).change.startswith("ulimit -l")
    assert machine_judged.judge_pids(limits).result is Result.WARNING
    assert machine_judged.judge_shared_memory(replace(MEMORY, shm_free=1024)).result is Result.WARNING
    assert machine_judged.judge_disk("/x", None).result is Result.FAILS
    assert machine_judged.judge_clocks(machine.Clocks(1e-9, 0.5, True)).result is Result.WARNING
    assert machine_judged.judge_clocks(machine.Clocks(1e-9, 0.0, False)).result is Result.WARNING
    assert machine_judged.judge_clocks(machine.Clocks(1e-9, 0.0, None)).result is Result.OK


def test_packages_are_held_against_what_is_asked_for() -> None:
    asked = ["here>=1,<2", "old>=2", "gone", "other>=1; extra == 'other'", "pooled; extra == 'pool'"]
    found = compare(asked, ("pool",), {"here": "1.5", "old": "1.9", "pooled": "3"}.get)
    assert (found.missing, list(found.wrong), found.seen) == ({"gone": "any version"}, ["old"], 4)
    judged = machine_judged.judge_packages(found.missing, found.wrong, found.seen)
    assert judged.result is Result.FAILS and "gone is not installed" in judged.finding and "old is 1.9" in judged.finding


def test_an_engine_that_computes_by_less_than_the_best_is_a_warning_and_none_fails() -> None:
    engine = told.Engine("2.11", 1, ("avx2", "plain"), "avx2", "/usr/bin/c++", "", "native", (), 1.0)
    assert results(list(told_judged.judge_engine(engine)))["engine"] is Result.OK
    slower = msgspec.structs.replace(
        engine, backend="torch", refused=("no compiler",), compiler="", compiler_problem="none found"
    )
    assert [one.result for one in told_judged.judge_engine(slower)] == [Result.OK, Result.WARNING, Result.WARNING]
    none = msgspec.structs.replace(engine, backend="", refused=("differs by 1",))
    assert results(list(told_judged.judge_engine(none)))["engine"] is Result.FAILS


def test_transfers_fail_over_tcp_and_are_doubtful_over_shared_memory() -> None:
    fine = told.Transfer("tcp", "lo", "", 0.1, 50, 0.01, 1e9)
    assert told_judged.judge_transfer("t", fine).finding.startswith("1,000 MB/s over lo")
    assert told_judged.judge_transfer("t", msgspec.structs.replace(fine, bytes_per_s=1e6)).result is Result.WARNING
    broken = msgspec.structs.replace(fine, problem="no such device")
    assert told_judged.judge_transfer("t", broken).result is Result.FAILS
    assert told_judged.judge_transfer("t", msgspec.structs.replace(broken, transport="cma")).result is Result.WARNING


@pytest.mark.parametrize(
    ("changes", "check", "result"),
    [
        ({}, "store", Result.OK),
        ({"redis_version": "6.2.1"}, "store", Result.FAILS),
        ({"role": "slave"}, "store", Result.FAILS),
        ({"maxmemory_policy": "allkeys-lru"}, "store eviction", Result.FAILS),
        ({"maxmemory": "0"}, "store memory", Result.WARNING),
        ({"used_memory": str(GIB)}, "store memory", Result.WARNING),
        ({"aof_enabled": "0"}, "store durability", Result.WARNING),
        ({"aof_enabled": "0", "connected_slaves": "1"}, "store durability", Result.OK),
        ({"rdb_last_bgsave_status": "err"}, "store durability", Result.FAILS),
    ],
)
def test_a_store_is_judged_by_what_it_tells(changes: dict[str, str], check: str, result: Result) -> None:
    store = msgspec.structs.replace(STORE, info={**STORE.info, **changes})
    assert results(list(told_judged.judge_store(store)))[check] is result


def test_rights_latency_clock_and_leases_of_a_store() -> None:
    denied = msgspec.structs.replace(STORE, denied=("ZADD in a script: NOPERM",), ping_p50_s=0.1, ping_p99_s=0.2, ahead_s=5.0)
    found = results(list(told_judged.judge_store(denied)))
    assert found["store rights"] is found["store clock"] is Result.FAILS and found["store latency"] is Result.WARNING
    assert told_judged.judge_skew("c", -0.5, 0.1).result is Result.WARNING
    assert told_judged.judge_skew("c", -0.5, 0.4).result is Result.OK, "as far as that can be told"
    assert told_judged.judge_leases(STORE, 1).result is Result.OK
    assert told_judged.judge_leases(STORE, 2).result is Result.FAILS
    lapsed = msgspec.structs.replace(STORE, leases={"router-0:a": -9.0})
    assert "1 run out" in told_judged.judge_leases(lapsed, None).finding
    gone = msgspec.structs.replace(STORE, problem="refused")
    assert [one.result for one in told_judged.judge_store(gone)] == [Result.FAILS]


def member(name: str, role: int, **changes: object) -> MemberSeen:
    values = {
        "role": role, "model": "m", "model_snapshot": "s" * 64, "layout_fingerprint": "f" * 32, "page_tokens": 16,
        "total_pages": 65, "context_tokens": 1024, "vocabulary_size": 100, "max_sequences": 8, "max_queued_tokens": 2048,
    }  # fmt: skip
    info = member_pb2.MemberInfo(peer={"member": name}, **{**values, **changes})
    return MemberSeen(f"{name}:1", "", info, member_pb2.MemberLoad(free_pages=64), ())


P, D = member_pb2.MEMBER_ROLE_PREFILL, member_pb2.MEMBER_ROLE_DECODE
ROUTER = RouterSeen("router:1", "", (pb.Model(name="m", prefill_members=1, decode_members=1),), ())


def test_a_cell_whose_parts_fit_is_fine() -> None:
    members = [member("p", P), member("d", D)]
    found = [*cell_judged.judge_routers([ROUTER]), *cell_judged.judge_members(members)]
    found += cell_judged.judge_agreement([ROUTER], members)
    assert {one.result for one in found} == {Result.OK}, found
    assert not any_fails(found)


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"model_snapshot": "t" * 64}, "same model"),
        ({"layout_fingerprint": "e" * 32}, "same page layout"),
        ({"context_tokens": 512}, "same context"),
        ({"adapters": [{"name": "a", "identity": "b"}]}, "same adapters"),
    ],
)
def test_members_that_do_not_fit_are_named(changes: dict[str, object], check: str) -> None:
    found = {one.check: one for one in cell_judged.judge_agreement([ROUTER], [member("p", P), member("d", D, **changes)])}
    assert found[check].result is Result.FAILS and "p" in found[check].finding and "d" in found[check].finding


def test_limits_and_conditions_of_members() -> None:
    small = {one.check: one for one in cell_judged.judge_members([member("d", D, total_pages=33)])}
    assert small["limits d"].result is Result.WARNING and "takes 64" in small["limits d"].finding
    short = results(list(cell_judged.judge_members([member("p", P, max_queued_tokens=512)])))
    assert short["limits p"] is Result.WARNING
    drains = dataclasses.replace(member("d", D), load=member_pb2.MemberLoad(draining=True), faults=("a page is lost",))
    found = results(list(cell_judged.judge_members([drains, MemberSeen("x:1", "UNAVAILABLE")])))
    assert (found["decode d"], found["books d"], found["member x:1"]) == (Result.WARNING, Result.FAILS, Result.FAILS)


def test_routers_that_see_too_little_fail() -> None:
    blind = dataclasses.replace(ROUTER, models=(pb.Model(name="m", prefill_members=1),))
    assert next(iter(cell_judged.judge_routers([blind]))).result is Result.FAILS
    seen = results(list(cell_judged.judge_agreement([blind], [member("p", P), member("d", D)])))
    assert seen["decode members of router:1"] is Result.FAILS and seen["prefill members of router:1"] is Result.OK
    gone = next(iter(cell_judged.judge_routers([RouterSeen("router:1", "UNAVAILABLE")])))
    assert gone.result is Result.FAILS


def test_versions_and_clocks_of_processes() -> None:
    first, second = ProcessSeen("a:1", "", "0.1.0", "router", 0.1), ProcessSeen("b:1", "", "0.2.0", "decode", 30.0)
    found = results(list(cell_judged.judge_processes([first, second, ProcessSeen("c:1", "refused")])))
    assert (found["same version"], found["metrics c:1"]) == (Result.WARNING, Result.WARNING)
    assert (found["clock router a:1"], found["clock decode b:1"]) == (Result.OK, Result.FAILS)


def test_a_request_is_a_check_of_everything() -> None:
    answered = Answered("", 0.2, 9.0, 0.1, {"first_token_s": 0.1})
    assert [one.result for one in cell_judged.judge_answer(answered)] == [Result.OK, Result.FAILS]
    assert [one.result for one in cell_judged.judge_answer(Answered("UNAVAILABLE: none"))] == [Result.FAILS]


@pytest.mark.parametrize(
    ("here", "there"),
    [(told.Engine, EngineFindings), (told.Transfer, TransferFindings), (told.Store, StoreFindings)],
)
def test_the_children_tell_what_is_read(here: type[msgspec.Struct], there: type[msgspec.Struct]) -> None:
    assert [(one.name, one.type) for one in msgspec.structs.fields(here)] == [
        (one.name, one.type) for one in msgspec.structs.fields(there)
    ]


def test_this_machine_can_be_read() -> None:
    assert machine.read_memory().available > 0
    assert machine.read_cpus().usable >= 1
    assert abs(machine.read_clocks().drift_s) < 60
    assert machine.port_problem("127.0.0.1:0") == ""
    assert machine.port_problem("127.0.0.1:99999") and machine.port_problem("256.0.0.1:80")


@pytest.mark.slow
def test_a_child_that_fails_or_hangs_says_so() -> None:
    with pytest.raises(ChildFailed, match="ended with"):
        measured(told.Store, ["router.doctor", "--no-such-flag"], 60.0)
    with pytest.raises(ChildFailed, match="did not end within 0 s"):
        measured(told.Store, ["router.doctor", "--redis-url", "unix:///none"], 0.01)
    found = measured(told.Store, ["router.doctor"], 60.0, {"TANDEM_REDIS_URL": "redis://127.0.0.1:1/0"})
    assert "Connect call failed" in found.problem


@pytest.mark.slow
async def test_a_fit_store_is_called_fit_and_nothing_stays_in_it() -> None:
    with EmbeddedServer() as server:
        found = await look(StoreDoctorSettings(redis_url=server.url))
        assert (found.problem, found.denied, found.leases) == ("", (), {})
        assert found.info["maxmemory_policy"] == "noeviction"
        assert 0 < found.ping_p50_s <= found.ping_p99_s and abs(found.ahead_s) < 1.0
        judged = list(told_judged.judge_store(msgspec.convert(msgspec.to_builtins(found), told.Store)))
        assert not any_fails([one for one in judged if one.check != "store latency"])


def test_a_cell_of_this_machine_is_found_by_its_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tandem-x"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ready = {"address": "127.0.0.1:7", "metrics_port": 8}
    cell = CellFile(
        "redis://x", (process_of("router-0", os.getpid(), ready), Process("decode", "decode-0", "127.0.0.1:9", "", 1))
    )
    write_cell_file(folder, cell)
    assert find_cell("localhost:7") == cell and cell.metrics() == ["127.0.0.1:8"]
    assert find_cell("127.0.0.1:9") is None, "it is no router"
    assert (folder / "cell.json").stat().st_mode & 0o077 == 0
    (folder / "cell.json").write_text("{")
    assert find_cell("127.0.0.1:7") is None

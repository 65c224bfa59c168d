"""What the process environment must say before NIXL is loaded, and names that prove a death."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kv_transfer.nixl import NixlReceiver, NixlSender, TransportSettings, prepare_environment
from rpc.incarnation import new_incarnation, proven_dead

NAMES = (
    "UCX_TLS",
    "UCX_USE_MT_MUTEX",
    "UCX_TCP_CONN_NB",
    "UCX_TCP_USER_TIMEOUT",
    "UCX_NET_DEVICES",
    "UCX_TCP_PORT_RANGE",
    "NIXL_LOG_LEVEL",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """An environment without any of the names, put back afterwards."""
    for name in NAMES:
        monkeypatch.setenv(name, "put back by the fixture")
        monkeypatch.delenv(name)


def test_everything_that_ucx_needs_is_set():
    prepare_environment("tcp", "lo", (45000, 45010))
    assert {name: os.environ.get(name) for name in NAMES} == {
        "UCX_TLS": "tcp",
        "UCX_USE_MT_MUTEX": "y",
        "UCX_TCP_CONN_NB": "y",
        "UCX_TCP_USER_TIMEOUT": "10s",
        "UCX_NET_DEVICES": "lo",
        "UCX_TCP_PORT_RANGE": "45000-45010",
        "NIXL_LOG_LEVEL": "WARN",
    }
    prepare_environment("tcp", "lo", (45000, 45010))


def test_an_operators_timeout_stays(monkeypatch):
    monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "4s")
    prepare_environment("cma")
    assert (os.environ["UCX_TCP_USER_TIMEOUT"], os.environ["UCX_TLS"]) == ("4s", "tcp,cma")
    assert "UCX_NET_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("efa",), "transport 'efa' is not known: choose one of cma, rdma, tcp"),
        (("tcp", "nosuch0"), "names 'nosuch0', which this machine lacks: choose from .*lo"),
        (("tcp", None, (45010, 45000)), "port_range is 45010-45000: give two ports from 1024 to 65535"),
        (("tcp", None, (80, 90)), "port_range is 80-90"),
    ],
)
def test_bad_settings_are_refused_with_what_to_do(arguments, sentence):
    with pytest.raises(TransportSettings, match=sentence):
        prepare_environment(*arguments)
    assert not [name for name in NAMES if name in os.environ]


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this machine has an RDMA device")
def test_rdma_without_a_device_is_refused():
    with pytest.raises(TransportSettings, match="transport rdma needs an RDMA device and /sys/class/infiniband shows none"):
        prepare_environment("rdma", "mlx5_0:1")
    assert not [name for name in NAMES if name in os.environ]


def test_a_contradicting_environment_is_refused(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "all")
    with pytest.raises(TransportSettings, match="UCX_TLS is 'all' in the environment and the settings need 'tcp': unset it"):
        prepare_environment()


@pytest.mark.parametrize("end", [NixlSender, NixlReceiver])
def test_no_agent_without_the_environment(end):
    with pytest.raises(TransportSettings, match="prepare_environment first"):
        end("name", [])


def test_too_late_is_refused(monkeypatch):
    # The true module would load torch into the test run.
    monkeypatch.setitem(sys.modules, "nixl_cu13._bindings", types.ModuleType("nixl_cu13._bindings"))
    with pytest.raises(TransportSettings, match=r"nixl was imported before UCX_TLS, .* was set: call prepare"):
        prepare_environment()
    assert "UCX_TLS" not in os.environ


def test_a_living_process_is_not_proven_dead():
    name = new_incarnation()
    assert name != new_incarnation()
    assert not proven_dead(name)


def test_a_dead_process_is_proven_dead():
    show = "from rpc.incarnation import new_incarnation; print(new_incarnation(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", show], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        name = process.stdout.readline().strip()
        assert not proven_dead(name)
        process.kill()
        process.wait()
    assert proven_dead(name)
    # The same process number with another start time is another process.
    boot, space, _, start, rest = name.split(".")
    assert proven_dead(f"{boot}.{space}.{os.getpid()}.{start}.{rest}")


def test_what_this_kernel_cannot_know_is_not_proven():
    boot, space, pid, _, rest = new_incarnation().split(".")
    for name in (f"{'0' * 8}.{space}.{pid}.1.{rest}", f"{boot}.1.{pid}.1.{rest}", "prefill-1", f"{boot}.{space}.{pid}.x.{rest}"):
        assert not proven_dead(name)

"""The flags of a cell's processes are settings that they have, and their stop budgets fit their drains."""

import contextlib
import dataclasses
import socket

import msgspec
import pytest

from decode_svc.config import DecodeSettings
from prefill_svc.config import PrefillSettings
from router.config import RouterSettings
from rpc.settings import load_settings
from tandem_cli import cell
from tandem_cli.cell import BadOption, CellOptions, check_listen, parse_setting
from tandem_cli.http_option import ANY_FREE, DEFAULT_HTTP, door_sentence, http_listen
from tandem_cli.supervisor import CellFailed, StopOrder

OPTIONS = CellOptions("m", kv_tokens=1000, context_tokens=512, extra=(("decode", "--max-step-tokens=99"),))
KINDS = {"prefill": PrefillSettings, "decode": DecodeSettings}


@pytest.mark.parametrize("role", KINDS)
def test_flags_of_members_are_their_settings(role: str) -> None:
    module, *argv = cell._member_argv(role, 3, OPTIONS, "cores")
    settings = load_settings(KINDS[role], argv, {})
    assert module == f"{role}_svc" and settings.name == f"{role}-3"
    assert (settings.total_pages - 1) * settings.page_tokens >= 1000
    assert settings.context_tokens == 512
    assert (settings.max_step_tokens == 99) == (role == "decode")
    fits(settings, cell.MEMBER_STOP)


def test_flags_of_routers_are_their_settings() -> None:
    module, *argv = cell._router_argv(0, OPTIONS, "", "127.0.0.1:1")
    settings = load_settings(RouterSettings, argv, {"TANDEM_REDIS_URL": "unix:///s"})
    assert module == "router" and settings.prefill_targets == () and settings.reflection
    assert settings.decode == ("127.0.0.1:1",)
    assert settings.listen == "127.0.0.1:50051"
    assert settings.http_listen is None
    fits(settings, cell.ROUTER_STOP)


def test_each_router_has_an_http_door_or_none_has() -> None:
    options = dataclasses.replace(OPTIONS, http="[::1]:8000")
    for number, listen in ((0, "[::1]:8000"), (1, "127.0.0.1:0")):
        argv = cell._router_argv(number, options, "", "")
        assert f"--http-listen {listen}" in " ".join(argv)


def test_the_http_door_of_up_takes_a_free_port_where_its_own_is_taken() -> None:
    assert http_listen("127.0.0.1:1", False) == "127.0.0.1:1"
    assert http_listen(None, True) == ""
    with pytest.raises(BadOption, match="--no-http goes not with --http"):
        http_listen("127.0.0.1:1", True)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else has it, which is as well
            probe.bind(("127.0.0.1", 8000))
            probe.listen()
        assert http_listen(None, False) == ANY_FREE
    url = "https://127.0.0.1:1"
    assert "is taken" in door_sentence(url, ANY_FREE) and "is taken" not in door_sentence(url, DEFAULT_HTTP)
    assert f"{url}/v1" in door_sentence(url, DEFAULT_HTTP)


def fits(settings: msgspec.Struct, stop: StopOrder) -> None:
    """A process is killed only when it did not keep its own budget."""
    assert stop.budget_s >= settings.drain_timeout_s + cell.CLOSE_MARGIN_S


def test_routers_stop_first_and_the_store_last() -> None:
    assert cell.ROUTER_STOP.rank < cell.MEMBER_STOP.rank < cell.STORE_STOP.rank


def test_set_names_a_role_and_a_setting() -> None:
    assert parse_setting("prefill.max_step_tokens=128") == ("prefill", "--max-step-tokens=128")
    assert parse_setting("router.cell=a=b") == ("router", "--cell=a=b")
    for wrong in ("x", "store.memory_mib=3", "prefill.Max=1", "prefill.=1", "prefill.x"):
        with pytest.raises(BadOption, match=r"ROLE\.SETTING=VALUE"):
            parse_setting(wrong)


@pytest.mark.parametrize("listen", ["", "50051", ":50051", "localhost", "localhost:x", "localhost:65536", "localhost:-1"])
def test_listen_is_host_and_port(listen: str) -> None:
    with pytest.raises(BadOption, match="host:port"):
        check_listen(listen)


def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(CellFailed, match=r"Address already in use\. Stop what listens there"):
            check_listen(f"127.0.0.1:{taken.getsockname()[1]}")
        free = taken.getsockname()[1]
    check_listen(f"127.0.0.1:{free}")
    check_listen("[::1]:0")

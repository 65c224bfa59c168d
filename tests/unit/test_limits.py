"""The page of limits is what the code says."""

from pathlib import Path

import pytest

from router.config import RouterSettings
from router.discovery import ADDRESSES_MAX, resolve
from rpc.server_settings import ServerSettings
from tools import limits


def test_the_page_is_current() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    assert page == limits.page(), "run: python -m tools.limits > docs/limits.md"


def test_a_setting_that_nothing_is_said_about_is_refused() -> None:
    said = limits.words()
    del said["settings"]["router"]["queue_requests"]
    with pytest.raises(limits.Unexplained, match="queue_requests"):
        limits._settings("router", RouterSettings, (ServerSettings,), said)


async def test_a_name_with_too_many_addresses_is_bounded() -> None:
    targets = tuple(f"10.0.{n // 256}.{n % 256}:50061" for n in range(ADDRESSES_MAX + 5))
    found = await resolve(targets, frozenset(), 1.0)
    assert found == frozenset(sorted(targets)[:ADDRESSES_MAX])

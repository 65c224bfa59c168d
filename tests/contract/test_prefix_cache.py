"""Prefixes between two whole members: a chat sends only what is new, and tenants find only what is theirs."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from lifecycle.prefix_keys import tenant_salt
from tandem.pools.v1 import grant_pb2, member_pb2, prefill_pb2
from tests.contract.test_decode_service_pair import Prefill, prefill_member
from tests.decode_member import Member, decode_member

pytestmark = pytest.mark.slow

SALT, OTHER = tenant_salt("one"), tenant_salt("another")
OUTPUT = 6


@dataclass
class Turn:
    """What one request brought: its text, pages that were asked for in each group, bytes that were sent, tokens found at either
    side."""

    said: list[int]
    pages: list[int]
    sent_bytes: int
    at_prefill: int
    at_decode: int


async def request(member: Member, prefill: Prefill, number: int, prompt: Sequence[int], salt: bytes) -> Turn:
    """What a router does; the output is what it would be without any cache."""
    key = grant_pb2.AttemptKey(request_id=f"turn-{number}", attempt=1)
    seat = await member.open(prompt, prefill=prefill.peer, key=key, max_output_tokens=OUTPUT, tenant_salt=salt)
    granted = await seat.until("granted")
    call = prefill.stub.Prefill(
        prefill_pb2.PrefillRequest(
            key=key,
            model_snapshot=member.runner.layout.model_snapshot,
            prompt_token_ids=prompt,
            grant=granted.grant,
            incarnation=prefill.incarnation,
            tenant_salt=salt,
        )
    )
    events = [event async for event in call]
    await seat.finish()
    assert seat.told == member.runner.said(prompt, OUTPUT)
    done = events[-1].committed
    pages = [sum(page > 0 for page in group.page_ids) for group in granted.grant.groups]
    return Turn(seat.told, pages, done.sent_bytes, done.cached_tokens, granted.cached_tokens)


async def test_a_chat_of_eight_turns_sends_only_new_pages() -> None:
    async with decode_member(total_pages=200) as member, prefill_member(member) as prefill:
        size = member.runner.page_tokens
        history: list[int] = []
        whole = sent = 0
        for number in range(8):
            new = [(17 * number + place) % 200 + 1 for place in range(9)]
            known = len(history) - 1 if history else 0  # the last token that was said was never fed
            history += new
            turn = await request(member, prefill, number, history, SALT)
            assert turn.at_decode == known // size * size
            assert turn.pages == [-(-len(history) // size) - known // size]
            assert turn.at_prefill <= turn.at_decode or number == 0
            whole += -(-len(history) // size)
            sent += turn.pages[0]
            history += turn.said
        assert sent < whole / 2.5
        await member.assert_empty()
        found = await prefill.admin.Check(member_pb2.CheckRequest())
        assert not found.faults and not found.books["jobs"]


@pytest.mark.parametrize("window", [6, 30, 500])
async def test_behind_a_window_a_chat_sends_what_is_new_and_still_seen(window: int) -> None:
    async with decode_member(total_pages=200, window=window) as member, prefill_member(member) as prefill:
        size = member.runner.page_tokens
        history: list[int] = []
        sent_bytes = 0
        for number in range(5):
            new = [(17 * number + place) % 200 + 1 for place in range(9)]
            known = max(0, len(history) - 1) // size
            history += new
            turn = await request(member, prefill, number, history, SALT)
            whole, gone = -(-len(history) // size), max(0, len(history) + 1 - window) // size
            assert turn.at_decode == known * size
            assert turn.pages == [whole - known, whole - max(known, gone)]
            assert turn.at_prefill == max(0, len(history) - len(new) - OUTPUT) // size * size
            sent_bytes += turn.sent_bytes
            history += turn.said
        await member.assert_empty()
        found = await prefill.admin.Check(member_pb2.CheckRequest())
        assert not found.faults and not found.books["jobs"]
        shown = dict(line.rsplit(" ", 1) for line in member.frame.metrics.text().splitlines() if not line.startswith("#"))
        assert float(shown["tandem_decode_received_bytes_total"]) == sent_bytes


@pytest.mark.parametrize("window", [None, 10])
async def test_b48_another_tenant_finds_nothing_at_either_side(window: int | None) -> None:
    async with decode_member(total_pages=200, window=window) as member, prefill_member(member) as prefill:
        prompt = list(range(1, 22))
        turns = [await request(member, prefill, n, prompt, salt) for n, salt in enumerate((SALT, OTHER, SALT, b"", b""))]
        # The token at 20 sees a page that the one at 21 does not, so that was never sent.
        again = (20, 20 if window is None else 0)
        assert [(turn.at_prefill, turn.at_decode) for turn in turns] == [(0, 0), (0, 0), again, (0, 0), (0, 0)]
        assert turns[2].pages == [1] * (1 if window is None else 2)
        assert turns[2].sent_bytes < turns[0].sent_bytes == turns[1].sent_bytes == turns[4].sent_bytes


async def test_both_members_show_what_their_caches_do() -> None:
    async with decode_member(total_pages=200) as member, prefill_member(member) as prefill:
        for number in range(2):
            await request(member, prefill, number, list(range(1, 22)), SALT)
        await member.assert_empty()
        shown = dict(line.rsplit(" ", 1) for line in member.frame.metrics.text().splitlines() if not line.startswith("#"))
        assert float(shown["tandem_decode_cached_tokens_total"]) == 20
        assert float(shown['tandem_decode_prefix_pages_total{result="hit"}']) == 5
        assert float(shown["tandem_decode_prefix_indexed_pages"]) == 6
        assert float(shown['tandem_decode_pages{state="cached"}']) == 6 and float(shown["tandem_decode_kv_used_ratio"]) == 0

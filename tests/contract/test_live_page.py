"""The live page: its files and data, and the page itself in a browser, on a router over fake members."""

import asyncio
import json

import httpx
import pytest

from router.config import RouterSettings
from router.service import LoadedModel, Router
from rpc.serving import Process
from tandem.pools.v1 import member_pb2
from tandem.v1 import inference_pb2 as pb
from tests.browser import Page, browser_page
from tests.contract.test_http_tls import Certified, certified
from tests.contract.test_router_access import ANN, BOB, OPERATOR, as_client, secured
from tests.redis_server import cell, redis_url
from tests.router_world import MODEL, ByteTokenizer, World, request, router_world, until

__all__ = ["cell", "certified", "redis_url", "secured"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

UI = {"http_listen": "127.0.0.1:0", "ui": True}
HOSTILE = '"><img/src=x/onerror=alert(1)>'
FILES = ("", "style.css", "app.js", "icon.svg", "dom.js", "playground.js")


def base_of(world: World) -> str:
    frame = world.routers[0].frame
    assert frame is not None
    return frame.addresses["http_url"]


async def watchers(world: World) -> int:
    return (await world.client.books())[0]["cell_watchers"]


async def test_files_come_with_a_policy_and_data_from_here_alone(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, **UI) as world, httpx.AsyncClient(base_url=base_of(world)) as http:
        for file in FILES:
            answer = await http.get(f"/ui/{file}")
            assert answer.status_code == 200, file
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await http.get("/ui")).headers["location"] == "ui/"
        assert (await http.get("/ui/../config.py")).status_code == (await http.get("/ui/none.js")).status_code == 404
        page = (await http.get("/ui/")).text
        assert "<script>" not in page and "style=" not in page and "//" not in page.replace("http://www.w3.org", "")
        crossed = await http.get("/ui/api/cell", headers={"sec-fetch-site": "cross-site"})
        assert (crossed.status_code, crossed.json()["error"]["code"]) == (403, "CROSS_SITE")


async def test_data_is_what_grpc_tells(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, **UI) as world, httpx.AsyncClient(base_url=base_of(world)) as http:
        assert (await world.client.generate(request("a/b c"))).completed
        record = (await http.get("/ui/api/requests/a%2Fb%20c")).json()
        assert (record["request_id"], record["state"]) == ("a/b c", "REQUEST_STATE_FINISHED")
        assert (await http.get("/ui/api/requests/unknown")).status_code == 404
        cancelled = await http.post("/ui/api/requests/a%2Fb%20c/cancel")
        assert cancelled.json()["outcome"] == "CANCEL_OUTCOME_ALREADY_ENDED"
        for query, field in (("period=0.1", "period"), ("period=x", "period"), ("max_ended=201", "max_ended")):
            wrong = await http.get(f"/ui/api/cell?{query}")
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, field)
        async with http.stream("GET", "/ui/api/cell?period=0.2") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.aiter_lines()
            views = [json.loads(line.removeprefix("data: ")) async for line in _data(lines, 2)]
            assert views[0]["ended"][0]["request_id"] == "a/b c" and views[0]["at"] < views[1]["at"]
            await until(lambda: watchers(world), 1)
        await until(lambda: watchers(world), 0)
        async with http.stream("GET", "/ui/api/cell?period=60") as stream:
            lines = stream.aiter_lines()
            assert [line async for line in _data(lines, 1)]
            assert await world.routers[0].drain() == 0
            (last,) = [json.loads(line.removeprefix("data: ")) async for line in _data(lines, 1)]
            assert last["error"]["code"] == "DRAINING"


async def _data(lines, count):
    """So many lines of data."""
    while count:
        line = await asyncio.wait_for(anext(lines), 20)
        if line.startswith("data:"):
            count -= 1
            yield line


async def test_who_asks_for_the_headers_of_the_views_gets_no_views(redis_url: str, cell: str) -> None:
    """And may ask for something else on the same connection at once."""
    one = httpx.Limits(max_connections=1)
    async with router_world(redis_url, cell, **UI) as world, httpx.AsyncClient(base_url=base_of(world), limits=one) as http:
        for _ in range(3):
            head = await http.head("/ui/api/cell")
            assert (head.status_code, head.headers["content-type"], head.content) == (200, "text/event-stream", b"")
            assert (await http.get("/ui/api/requests/unknown")).status_code == 404
        await until(lambda: watchers(world), 0)


async def test_without_the_setting_there_is_no_page(redis_url: str, cell: str) -> None:
    async with (
        router_world(redis_url, cell, http_listen="127.0.0.1:0") as world,
        httpx.AsyncClient(base_url=base_of(world)) as http,
    ):
        for path in ("/ui", "/ui/", "/ui/api/cell"):
            assert (await http.get(path)).status_code == 404
    with pytest.raises(ValueError, match="http_listen must be set too"):
        RouterSettings(redis_url="redis://x", decode=("a:1",), prefill=("none",), ui=True)


async def test_the_page_shows_members_and_requests_as_text(redis_url: str, cell: str) -> None:
    """Of whatever names: they are made by clients."""
    async with router_world(redis_url, cell, decodes=2, trust_tenant_header=True, **UI) as world, browser_page() as page:
        pages = member_pb2.PagesByState(free=600, owned=300, cached=60, granted=30, quarantined=10)
        world.decode.load.CopyFrom(member_pb2.MemberLoad(free_pages=600, running_sequences=3, pages=pages))
        world.decodes[1].load.draining = True
        for member in world.decodes:
            member.tell()
        await page.open(f"{base_of(world)}/ui/")
        await page.shows("#link", "live")
        for name in ("prefill-0", "decode-0", "decode-1"):
            await page.shows(".member h4", name)
        await page.shows(".member", "340 of 1,000 pages in use · 60 cached · 30 granted · 10 quarantined")
        await page.shows(".member .pill", "draining")
        world.decode.script.output.hold()
        running = world.client.begin(request(HOSTILE), metadata=(("tandem-tenant", HOSTILE),))
        await page.shows("#live .link", HOSTILE)
        await page.shows("#live .clip", HOSTILE)
        await page.shows("#live .pill", "decode")
        await page.click("#live .link")
        await page.shows("#detail-body", "decoding")
        await page.shows("#detail-title", HOSTILE)
        world.decode.script.output.release()
        await running
        await page.shows("#ended .link", HOSTILE)
        await page.shows("#detail-body", "finished")
        assert await page.run("document.querySelectorAll('main img, dialog img').length") == 0
        segments = "[...document.querySelectorAll('#ended .phases .segment')].map((one) => one.className.split(' ')[1])"
        assert {"queue", "prefill", "decode"} <= set(await page.run(segments))
        _nothing_amiss(page, base_of(world))


def _nothing_amiss(page: Page, base: str) -> None:
    """No error in the console, no call to anywhere else."""
    assert page.console == []
    assert page.requests and all(url.startswith(f"{base}/") for url in page.requests), page.requests


async def test_the_page_comes_back_with_its_router(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, **UI) as world, browser_page() as page:
        settings = world.routers[0].frame.settings  # type: ignore[union-attr]
        await page.open(f"{base_of(world)}/ui/")
        await page.shows("#link", "live")
        first = await page.text("#router")
        address = world.routers[0].frame.addresses["http_address"]  # type: ignore[union-attr]
        await world.routers[0].drain()
        await world.routers[0].close()
        await page.shows("#link", "reconnecting")
        await page.until("!document.getElementById('notice').hidden")
        again = RouterSettings(
            **{name: getattr(settings, name) for name in settings.__struct_fields__} | {"http_listen": address}
        )
        process = Process(lambda frame: Router(frame, again, lambda: LoadedModel(MODEL, ByteTokenizer())), again, "router")
        world.routers.append(process)
        await process.open()
        await page.shows("#link", "live")
        await page.until("document.getElementById('notice').hidden")
        assert await page.text("#router") != first
        assert all(line.startswith("network error") for line in page.console), page.console


async def test_the_playground_streams_and_stops(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, **UI) as world, browser_page() as page:
        world.decode.script.tokens = 6
        world.decode.script.text = lambda index: f"<b>{index}</b> "
        world.decode.script.output.hold()
        await page.open(f"{base_of(world)}/ui/")
        await page.shows("#link", "live")
        await page.click("#run")
        for _ in range(2):
            world.decode.script.output.step()
        await page.shows("#output", "<b>0</b>")
        assert "<b>5</b>" not in await page.text("#output"), "it streams"
        assert await page.run("document.getElementById('run').disabled")
        world.decode.script.output.release()
        await page.shows("#figures", "max output tokens")
        assert (await page.text("#output")).strip() == "<b>0</b> <b>1</b> <b>2</b> <b>3</b> <b>4</b> <b>5</b>"
        assert "6" in await page.text("#figures") and await page.run("document.getElementById('stop').disabled")
        (opening,) = world.decode.opens
        assert opening.key.request_id in await page.text("#figures")

        world.decode.script.output.hold()
        await page.click('input[value="plain"]')
        assert not await page.run("document.getElementById('system-field').checkVisibility()")
        await page.click("#run")
        world.decode.script.output.step()
        await page.shows("#output", "<b>0</b>")
        request_id = world.decode.opens[-1].key.request_id
        await page.click("#stop")
        await world.client.until_state(request_id, "cancelled", 20.0)
        await page.shows("#figures", "cancelled")
        assert (await world.client.get(request_id)).finish_reason == pb.FINISH_REASON_CANCELLED
        world.decode.script.output.release()
        _nothing_amiss(page, base_of(world))


async def test_a_tenant_sees_its_own_requests_with_its_token(redis_url: str, cell: str, secured: dict[str, object]) -> None:
    async with (
        router_world(redis_url, cell, **secured, **UI) as world,
        httpx.AsyncClient(base_url=base_of(world)) as http,
        browser_page() as page,
    ):
        assert (await http.get("/ui/")).status_code == 200
        for path in ("/ui/api/cell", "/ui/api/requests/r"):
            assert (await http.get(path)).status_code == 401
        world.decode.script.output.hold()
        mine, others = as_client(world, ANN), as_client(world, BOB)
        running = [mine.begin(request("of-ann")), others.begin(request("of-bob"))]
        await mine.until_state("of-ann", "decoding", 30)
        await others.until_state("of-bob", "decoding", 30)
        await page.open(f"{base_of(world)}/ui/")
        await page.shows("#link", "needs a token")
        await page.shows("#notice", "a token is needed")
        await page.click("#access")
        await page.run(f"document.getElementById('token').value = '{ANN}'")
        await page.click("#access-form .primary")
        await page.shows("#live .link", "of-ann")
        await page.shows("#requests-count", "1 running")
        assert "of-bob" not in await page.text("body") and world.decode.address not in await page.text("body")
        assert await page.run("sessionStorage.length + ' ' + localStorage.length") == "1 0"
        operator = {"authorization": f"Bearer {OPERATOR}"}
        async with http.stream("GET", "/ui/api/cell", headers=operator) as stream:
            (line,) = [line async for line in _data(stream.aiter_lines(), 1)]
        assert {one["request_id"] for one in json.loads(line.removeprefix("data: "))["requests"]} == {"of-ann", "of-bob"}
        world.decode.script.output.release()
        await asyncio.gather(*running)
        for client in (mine, others):
            await client.channel.close()


async def test_the_page_runs_over_https(redis_url: str, cell: str, certified: Certified) -> None:
    async with router_world(redis_url, cell, **{**UI, **certified.settings}) as world, browser_page(any_certificate=True) as page:
        assert base_of(world).startswith("https://")
        await page.open(f"{base_of(world)}/ui/")
        await page.shows("#link", "live")
        await page.click("#run")
        await page.shows("#output", "t0 t1 t2")
        await page.shows("#ended", "max output tokens")
        _nothing_amiss(page, base_of(world))


async def test_a_refused_run_is_told(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, **UI) as world, browser_page() as page:
        await page.open(f"{base_of(world)}/ui/")
        await page.shows("#link", "live")
        await page.run("document.querySelector('[name=max_tokens]').value = 5000")
        await page.click("#run")
        await page.shows("#output .failed", "512")
        assert not await page.run("document.getElementById('run').disabled")

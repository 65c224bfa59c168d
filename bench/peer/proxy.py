"""The door of the peer's P/D pair: prefill at one server, then decode at the other, whose events pass through unread.

Run by the peer's own Python (aiohttp is among its packages): `proxy.py PORT PREFILL_ADDRESS DECODE_ADDRESS`. It does what vLLM's
examples for its NIXL connector do: the first server answers one token and says where its KV lies, the second one fetches it.
"""

import asyncio
import sys
from contextlib import asynccontextmanager

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

#: What the first server is told: keep the KV for somebody who fetches it.
KEEP_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
BODY_BYTES_MAX = 1 << 24


class Refused(Exception):
    """A server did not answer 200. `status` and `body` are what it said."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body


class Proxy:
    """Two servers behind one path."""

    def __init__(self, session: ClientSession, prefill: str, decode: str) -> None:
        self._session = session
        self._prefill = f"http://{prefill}/v1/completions"
        self._decode = f"http://{decode}/v1/completions"

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = await request.json()
        try:
            first = {**body, "max_tokens": 1, "stream": False, "return_token_ids": False, "kv_transfer_params": KEEP_KV}
            async with self._post(self._prefill, first) as answer:
                kept = (await answer.json())["kv_transfer_params"]
            async with self._post(self._decode, {**body, "kv_transfer_params": kept}) as answer:
                return await _pass_on(request, answer)
        except Refused as refused:
            return web.Response(status=refused.status, body=refused.body)

    @asynccontextmanager
    async def _post(self, url, body):
        async with self._session.post(url, json=body) as answer:
            if answer.status != 200:
                raise Refused(answer.status, await answer.read())
            yield answer


async def _pass_on(request: web.Request, answer) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": answer.headers.get("Content-Type", "text/event-stream")})
    response.enable_chunked_encoding()
    await response.prepare(request)
    async for piece in answer.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response


async def serve(port: int, prefill: str, decode: str) -> None:
    """Until this process is told to end."""
    session = ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None))
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.router.add_post("/v1/completions", Proxy(session, prefill, decode).complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    """Serve, on uvloop where the environment has it."""
    port, prefill, decode = sys.argv[1:]
    try:
        from uvloop import run
    except ImportError:
        run = asyncio.run
    run(serve(int(port), prefill, decode))


if __name__ == "__main__":
    main()

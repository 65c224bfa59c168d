"""The live page at /ui: its files, and the data that it shows. A part of the HTTP door, there where the setting `ui` is on.

The files hold nothing of the cell, so everybody gets them; data goes by the identity of the call, as over gRPC. The page loads
nothing from anywhere else, and its policy forbids that and scripts inside of pages.
"""

import math
from collections.abc import Callable, Sequence
from importlib import resources

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from router.cell_picture import MAX_LISTED
from router.cell_servicer import DEFAULT_PERIOD_S, DEFAULT_REQUESTS, CellServicer, Wish
from router.http.cell_events import CellEvents
from router.http.context import HttpContext, metadata_of
from router.http.errors import HttpError
from router.http.host import Host, Part
from router.recent_ends import MAX_ENDED
from rpc.status import StatusError, Violation, invalid_argument
from tandem.v1 import inference_pb2 as pb

#: Ended requests that the page lists unless it is told.
_PAGE_ENDED = 50
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
#: What browsers say of calls that a page of this very origin makes, or its user; others have no business here.
_OWN_SITES = ("same-origin", "none")


def part(cell: Callable[[], CellServicer]) -> Part:
    """The page as a part of the door; `cell` raises StatusError before the router has started."""

    def routes(host: Host) -> Sequence[BaseRoute]:
        if not host.settings.ui:
            return []
        return [*_files(), *_data(host, cell)]

    return routes


def _files() -> list[BaseRoute]:
    """One route for each file of the page; there are no others to be asked for."""
    made: list[BaseRoute] = [Route("/ui", _to_page)]
    for file in (resources.files("router.http") / "ui").iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/ui/" if file.name == "index.html" else f"/ui/{file.name}"
            made.append(Route(path, _file(file.read_bytes(), kind)))
    return made


async def _to_page(request: Request) -> Response:
    # Relative: what stands before /ui is a matter of whoever passes calls on.
    return RedirectResponse("ui/", status_code=308)


def _file(content: bytes, kind: str) -> Callable[[Request], object]:
    async def answer(request: Request) -> Response:
        return Response(content, headers={**_HEADERS, "content-type": kind})

    return answer


def _data(host: Host, cell: Callable[[], CellServicer]) -> list[BaseRoute]:
    """/ui/api/cell: views as server-sent events. /ui/api/requests/ID: its record; …/cancel ends it."""

    async def views(request: Request) -> Response:
        _check_site(request)
        servicer = cell()
        tenant = await servicer.sight(_call(request))
        return CellEvents(servicer.watch_as, _wish(request), tenant)

    async def record(request: Request) -> Response:
        _check_site(request)
        asked = pb.GetRequest(request_id=request.path_params["request_id"])
        answer = await host.serving().get(asked.SerializeToString(), _call(request))
        return _json(answer.record)

    async def cancel(request: Request) -> Response:
        _check_site(request)
        asked = pb.CancelRequest(request_id=request.path_params["request_id"], reason="cancelled on the live page")
        return _json(await host.serving().cancel(asked.SerializeToString(), _call(request)))

    return [
        Route("/ui/api/cell", views),
        Route("/ui/api/requests/{request_id:path}/cancel", cancel, methods=["POST"]),
        Route("/ui/api/requests/{request_id:path}", record),
    ]


def _call(request: Request) -> HttpContext:
    """A call of the page as the servicers see it. What it asks of them answers with one message."""
    return HttpContext(metadata_of(request.headers), None, _write_nothing)


async def _write_nothing(event: bytes) -> None:
    pass


def _check_site(request: Request) -> None:
    """Raises HttpError for a call that another site's page makes in its reader's name."""
    if request.headers.get("sec-fetch-site", "none") not in _OWN_SITES:
        raise HttpError(403, "these calls are for the live page of this very router", "CROSS_SITE")


def _wish(request: Request) -> Wish:
    """The bounds that the query asks for. Raises StatusError naming the field."""
    query = request.query_params
    return Wish(
        period_s=_number(query.get("period"), "period", DEFAULT_PERIOD_S),
        max_requests=round(_number(query.get("max_requests"), "max_requests", min(DEFAULT_REQUESTS, MAX_LISTED))),
        max_ended=round(_number(query.get("max_ended"), "max_ended", min(_PAGE_ENDED, MAX_ENDED))),
    )


def _number(text: str | None, field: str, otherwise: float) -> float:
    if text is None:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _no_number(field, text)
    return value


def _no_number(field: str, text: str) -> StatusError:
    return invalid_argument([Violation(field, f"must be a number, not {text[:32]!r}", "NOT_A_NUMBER")])


def _json(message: Message) -> Response:
    """A message in protobuf's JSON mapping, with the names of the .proto file: as `tandem --json` writes it."""
    content = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return JSONResponse(content, headers={"cache-control": "no-store", "x-content-type-options": "nosniff"})

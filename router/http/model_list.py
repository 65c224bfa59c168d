"""GET /v1/models: the cell's model, and its adapters, each under the name that `model` takes."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from router.http.context import HttpContext, metadata_of
from router.http.errors import HttpError
from router.http.host import Host

OWNER = "tandem"


def routes(host: Host) -> Sequence[BaseRoute]:
    """The list, and one of it by name."""

    async def listed(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await _models(host, request)})

    async def one(request: Request) -> Response:
        name = request.path_params["model"]
        models = await _models(host, request)
        for model in models:
            if model["id"] == name:
                return JSONResponse(model)
        there = ", ".join(repr(model["id"]) for model in models)
        raise HttpError(404, f"no model is called {name[:256]!r}; this cell serves {there}", "UNKNOWN_MODEL", "model")

    return [Route("/v1/models", listed), Route("/v1/models/{model:path}", one)]


async def _models(host: Host, request: Request) -> list[dict[str, Any]]:
    context = HttpContext(metadata_of(request.headers), None, _nothing)
    answer = await host.serving().list_models(b"", context)
    found = []
    for model in answer.models:
        base = {"object": "model", "created": host.started_at, "owned_by": OWNER, "max_model_len": model.context_tokens}
        found.append({"id": model.name, **base, "root": model.name, "parent": None})
        found += [{"id": name, **base, "root": name, "parent": model.name} for name in model.adapters]
    return found


async def _nothing(event: bytes) -> None:
    """A list has no events."""

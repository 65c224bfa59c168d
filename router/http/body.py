"""The body of a call: read within bounds, and decoded with the name of what is wrong."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from router.http.errors import HttpError
from router.http.guard import ClientGone

T = TypeVar("T")

#: What msgspec says behind the words about a field that is wrong.
_AT = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


async def read_body(headers: Headers, receive: Receive, most_bytes: int, within_s: float) -> bytes:
    """The whole body. Raises HttpError: 415 when it is not said to be JSON, 413 when it is larger than `most_bytes`, 408 when it
    does not come within `within_s` seconds. Raises ClientGone."""
    _check_type(headers.get("content-type", ""))
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > most_bytes:
        raise _too_large(most_bytes)
    try:
        async with asyncio.timeout(within_s):
            return await _pieces(receive, most_bytes)
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {within_s:g} s", "BODY_TIMEOUT") from None


def decoded(data: bytes, kind: type[T], path: str = "") -> T:
    """JSON as a value of `kind`, a Struct. Raises HttpError (400) naming the field; `path` is where `data` was found."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        words = str(error)
        found = _AT.search(words)
        inner = found["path"] if found else ""
        field = ".".join(part for part in (path, inner) if part)
        said = words[: found.start()] if found else words
        sentence = said[:1].lower() + said[1:].replace("`", "")
        message = f"{field}: {sentence}" if field else f"the body: {sentence}"
        raise HttpError(400, message, "INVALID_REQUEST", field or None) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}", "MALFORMED_JSON") from None


async def _pieces(receive: Receive, most_bytes: int) -> bytes:
    found = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        found += message.get("body", b"")
        if len(found) > most_bytes:
            raise _too_large(most_bytes)
        if not message.get("more_body", False):
            return bytes(found)


def _check_type(content_type: str) -> None:
    """A page of another site can make a browser post anything but JSON without being asked whether it may."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpError(415, "the body must be JSON, with content-type: application/json", "NOT_JSON", "content-type")


def _too_large(most_bytes: int) -> HttpError:
    return HttpError(413, f"the body may have at most {most_bytes} bytes", "BODY_TOO_LARGE")

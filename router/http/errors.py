"""Errors as HTTP tells them: a status, and one object {"error": {"message", "type", "param", "code", "status"}}.

The status codes are those of google.rpc.Code in HTTP, as google/rpc/code.proto names them, with what the OpenAI API and vLLM make
of them: 422 for an id that was used with another body, 410 for events that are not kept any more.
"""

import json
import math

from grpc import StatusCode

from rpc.details import cut
from rpc.status import StatusError

#: Status of a call whose client went away, and of a request that was cancelled (nginx's "client closed request").
CLIENT_CLOSED = 499
#: Most bytes of an error's message.
MESSAGE_BYTES = 4096

_STATUSES = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.OUT_OF_RANGE: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.ABORTED: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: CLIENT_CLOSED,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
_REASON_STATUSES = {"IDEMPOTENCY_KEY_REUSED": 422, "REPLAY_GONE": 410}
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    410: "GoneError",
    413: "ContentTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    CLIENT_CLOSED: "CancelledError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
#: Statuses of failures that may be over in a moment.
_RETRIED = frozenset({429, 503})
#: Seconds of Retry-After at most: OpenAI's clients take no longer ones for an answer, and come back within seconds instead.
RETRY_AFTER_MAX_S = 60


class HttpError(Exception):
    """An answer that is not 2xx. `param`: the field that is wrong; `code`: the reason, for programs.

    retry_after_s: seconds after which another try may do better.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, object]:
        """The object that the client is told, in an answer or in the middle of a stream."""
        return {
            "error": {
                "message": cut(self.message, MESSAGE_BYTES),
                "type": _TYPES.get(self.status, "InternalServerError"),
                "param": self.param,
                "code": self.code,
                "status": self.status,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the status. OpenAI's clients ask `x-should-retry` before they go by the status."""
        found = {}
        if self.status in _RETRIED:
            after_s = 1.0 if self.retry_after_s is None else self.retry_after_s
            found["retry-after"] = str(min(RETRY_AFTER_MAX_S, max(1, math.ceil(after_s))))
        else:
            found["x-should-retry"] = "false"
        if self.status == 408:
            found["connection"] = "close"
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found

    def encoded(self) -> bytes:
        """`body` as JSON."""
        return json.dumps(self.body).encode()


def from_status(error: StatusError) -> HttpError:
    """What a gRPC status is in HTTP; the param is the first field that is wrong."""
    status = _REASON_STATUSES.get(error.reason) or _STATUSES.get(error.code, 500)
    violations = error.details.violations
    param = violations[0].field or None if violations else None
    return HttpError(status, error.message, error.reason, param, retry_after_s=error.details.retry_after_s)

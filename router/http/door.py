"""The HTTP door of one router: made before the router loads its model, closed after its last request."""

from collections.abc import Callable

from router.config import RouterSettings
from router.http.app import build_app
from router.http.host import Host
from router.http.protocol import Bounds
from router.http.server import HttpServer
from router.servicer import InferenceServicer
from rpc.application import Frame, lasting
from telemetry.http_metrics import HttpMetrics


class HttpDoor:
    """Listens at `listen`. `serving` raises StatusError as long as the router has not started."""

    def __init__(self, listen: str, frame: Frame, settings: RouterSettings, serving: Callable[[], InferenceServicer]) -> None:
        """Takes the port. Raises OSError."""
        self._frame = frame
        self.host = Host(frame, settings, serving)
        app = build_app(self.host, HttpMetrics(frame.metrics).ended)
        self._server = HttpServer(listen, app, Bounds(settings.http_connections, settings.http_read_s))
        self.address = self._server.address

    def start(self) -> None:
        """Begins to answer: at first that the model is being loaded."""
        lasting(self._server.start(), self._frame.crashed)

    async def idle(self) -> None:
        """Returns when every answer to a client's request is finished."""
        await self.host.answers.none_left()

    async def stop(self) -> None:
        """Ends every connection; requests have ended by now."""
        await self._server.stop()

"""The HTTP door of one router: made before the router loads its model, closed after its last request."""

from collections.abc import Callable, Sequence

from router.config import RouterSettings
from router.http.app import PARTS, build_app
from router.http.host import Host, Part
from router.http.protocol import Bounds
from router.http.server import HttpServer
from router.servicer import InferenceServicer
from rpc.application import Frame, lasting
from rpc.tls import server_tls
from telemetry.http_metrics import HttpMetrics


class HttpDoor:
    """Listens at `listen`, with the certificate of the gRPC server where it has one.

    `serving` raises StatusError as long as the router has not started.
    """

    def __init__(
        self,
        listen: str,
        frame: Frame,
        settings: RouterSettings,
        serving: Callable[[], InferenceServicer],
        more: Sequence[Part] = (),
    ) -> None:
        """Takes the port. `more`: parts beside those of every door. Raises OSError, and BadFile naming a setting."""
        self._frame = frame
        self.host = Host(frame, settings, serving)
        app = build_app(self.host, HttpMetrics(frame.metrics).ended, (*PARTS, *more))
        tls = server_tls(settings)
        self._server = HttpServer(listen, app, Bounds(settings.http_connections, settings.http_read_s), tls)
        self.address = self._server.address
        self.url = f"{'http' if tls is None else 'https'}://{self.address}"

    def start(self) -> None:
        """Begins to answer: at first that the model is being loaded."""
        lasting(self._server.start(), self._frame.crashed)

    async def idle(self) -> None:
        """Returns when every answer to a client's request is finished."""
        await self.host.answers.none_left()

    async def stop(self) -> None:
        """Ends every connection; requests have ended by now."""
        await self._server.stop()

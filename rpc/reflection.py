"""Server reflection, so that a client can call without our .proto files. Off unless asked for."""

from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Offer the descriptors of `service_names` and of the reflection service itself on `server`."""
    reflection.enable_server_reflection([*service_names, reflection.SERVICE_NAME], server)

"""What grpc.aio has and its type stubs lack."""

from typing import Any

from grpc import aio

#: What `read` of a call returns after its last message.
EOF: Any = vars(aio)["EOF"]

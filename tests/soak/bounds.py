"""How much each kind of process may grow while it serves, at rest and warm. From what a soak measured; see docs/soak.md."""

from tests.soak.verdict import Bound, Way

#: New connections after a peer's restart are made beside what is left of the old ones for a while.
_COUNTS = (
    Bound("threads", "threads", Way.LEVEL, 4.0, for_a_start=0.1),
    Bound("descriptors", "descriptors", Way.LEVEL, 12.0, for_a_start=0.1),
    Bound("sockets", "sockets", Way.LEVEL, 8.0, for_a_start=0.1),
    Bound("shm_files", "files", Way.LEVEL, 0.0),
)
_MEMBER = (
    Bound("rss", "MiB", Way.SLOPE, 64.0, for_a_start=1.0),
    Bound("anonymous", "MiB", Way.SLOPE, 64.0, for_a_start=1.0),
    Bound("objects", "objects", Way.SLOPE, 10_000.0, for_a_start=50.0),
    Bound("blocks", "blocks", Way.SLOPE, 40_000.0, for_a_start=200.0),
    *_COUNTS,
)
BOUNDS = {
    "router": (
        Bound("rss", "MiB", Way.SLOPE, 32.0, for_a_start=0.5),
        Bound("anonymous", "MiB", Way.SLOPE, 32.0, for_a_start=0.5),
        Bound("objects", "objects", Way.SLOPE, 20_000.0, for_a_start=50.0),
        Bound("blocks", "blocks", Way.SLOPE, 80_000.0, for_a_start=200.0),
        *_COUNTS,
    ),
    "prefill": _MEMBER,
    "decode": _MEMBER,
    "store": (
        # Records of ended requests are kept for an hour: what else there is must not grow.
        Bound("other_keys", "keys", Way.LEVEL, 4.0),
        *_COUNTS,
    ),
}
#: Records are kept (router.redis_link:RedisSettings.retention_s); one may take so much of the store's memory.
RECORD_BYTES_MAX = 8192.0
#: Lines of all processes together, for each request that was asked, faults and restarts included.
LOG_BYTES_MAX = 65_536.0

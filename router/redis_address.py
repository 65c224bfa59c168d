"""Where the request store is, as a URL says it. Pure.

One server, the master that Sentinels know under a name, or a Redis Cluster. Messages repeat nothing but the scheme: a
password that was not escaped can be anywhere behind it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

FORM = (
    "redis://[user:password@]host:port/db, unix:///path, redis-sentinel://host:26379,host:26379/name[/db] or "
    "redis-cluster://host:6379,host:6379, each also as rediss…:// for TLS"
)


class StoreKind(Enum):
    """How many servers there are, and who says which of them is written to."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_SCHEMES = {
    "redis": StoreKind.SINGLE,
    "rediss": StoreKind.SINGLE,
    "unix": StoreKind.SINGLE,
    "redis-sentinel": StoreKind.SENTINEL,
    "rediss-sentinel": StoreKind.SENTINEL,
    "redis-cluster": StoreKind.CLUSTER,
    "rediss-cluster": StoreKind.CLUSTER,
}
_DEFAULT_PORTS = {StoreKind.SINGLE: 6379, StoreKind.SENTINEL: 26379, StoreKind.CLUSTER: 6379}
_MAX_PORT = 65535
_ESCAPES = "/ is written %2F, ? %3F, # %23, @ %40"
#: What may stand after the question mark. Time limits and the protocol are the router's own affair.
_OPTIONS = ("db", "username", "password", "client_name")
_TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_ca_data",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_ciphers",
)
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """`nodes` are where to begin: the server, Sentinels, or some nodes of the cluster; empty with a unix socket (`path`).

    `service` is the master's name with its Sentinels. `login` and `tls_options` are named as the client library takes them.
    """

    kind: StoreKind
    nodes: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0
    tls: bool = False
    login: Mapping[str, str] = field(default_factory=dict)
    tls_options: Mapping[str, Any] = field(default_factory=dict)


def parse_address(url: str) -> StoreAddress:
    """The address that a URL names. Raises ValueError with what is wrong and the form to use."""
    parts = _split(url)
    kind = _SCHEMES.get(parts.scheme)
    if kind is None:
        raise ValueError(f"scheme {parts.scheme!r} is not one of {', '.join(_SCHEMES)}; the form is {FORM}")
    tls = parts.scheme.startswith("rediss")
    login, hosts = _login(parts.netloc)
    options = _options(parts.query, tls=tls)
    login |= {name: options.pop(name) for name in ("username", "password", "client_name") if name in options}
    if parts.scheme == "unix":
        if hosts or not parts.path.strip("/"):
            raise ValueError("a unix:// URL names the path of a socket, unix:///path")
        return StoreAddress(kind, path=unquote(parts.path), db=_db(options.get("db", "")), login=login)
    service, db = _path(kind, parts.path, options.pop("db", ""))
    return StoreAddress(kind, _nodes(kind, hosts), "", service, db, tls, login, options)


def holds_password(url: str) -> bool:
    """Whether a URL has a password in it, or could have one where it cannot be read."""
    try:
        return "password" in parse_address(url).login
    except ValueError:
        return "@" in url or "password" in url


def _split(url: str) -> SplitResult:
    scheme, separator, rest = url.partition("://")
    ends = [place for mark in "/?#" if (place := rest.find(mark)) >= 0]
    authority = rest[: min(ends, default=len(rest))]
    try:
        # The hosts are read here: some releases of the library refuse a list with an address in brackets.
        return urlsplit(f"{scheme}{separator}{rest[len(authority) :]}")._replace(netloc=authority)
    except ValueError:
        raise ValueError(f"it is not a URL of the form {FORM}") from None


def _login(netloc: str) -> tuple[dict[str, str], str]:
    """User and password, and what follows them."""
    who, at, hosts = netloc.rpartition("@")
    if not at:
        return {}, netloc
    user, colon, password = who.partition(":")
    named = {"username": unquote(user), "password": unquote(password) if colon else ""}
    return {name: value for name, value in named.items() if value}, hosts


def _nodes(kind: StoreKind, hosts: str) -> tuple[tuple[str, int], ...]:
    if not hosts and kind is StoreKind.SINGLE:
        return (("localhost", _DEFAULT_PORTS[kind]),)
    listed = hosts.split(",")
    if kind is StoreKind.SINGLE and len(listed) > 1:
        raise ValueError("several hosts need redis-sentinel:// or redis-cluster://")
    return tuple(_node(one, _DEFAULT_PORTS[kind]) for one in listed)


def _node(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0 or (text.rpartition("]")[2].partition(":")[1] and port is None):
        raise ValueError(f"a host is not of the form host:port with a port from 1 to {_MAX_PORT} (in passwords, {_ESCAPES})")
    return host, port or default_port


def _path(kind: StoreKind, path: str, db: str) -> tuple[str, int]:
    """The master's name (Sentinel only) and the number of the database."""
    steps = [unquote(step) for step in path.strip("/").split("/")] if path.strip("/") else []
    service = ""
    if kind is StoreKind.SENTINEL:
        if not steps:
            raise ValueError("the name of the master is missing: redis-sentinel://host:26379,host:26379/name[/db]")
        service = steps.pop(0)
    if len(steps) > 1:
        raise ValueError(f"the path has too many parts; the form is {FORM} (in passwords, {_ESCAPES})")
    number = _db(db or (steps[0] if steps else ""))
    if kind is StoreKind.CLUSTER and number:
        raise ValueError("a cluster has no databases: leave the path out")
    return service, number


def _db(text: str) -> int:
    if not text:
        return 0
    if not text.isdecimal():
        raise ValueError(f"the database is not a whole number (in passwords, {_ESCAPES})")
    return int(text)


def _options(query: str, *, tls: bool) -> dict[str, Any]:
    allowed = (*_OPTIONS, *_TLS_OPTIONS) if tls else _OPTIONS
    found: dict[str, Any] = {}
    for name, values in parse_qs(query, keep_blank_values=True).items():
        if name not in allowed:
            hint = "; those of TLS need a rediss scheme" if name in _TLS_OPTIONS else ""
            raise ValueError(f"an option is not one of {', '.join(allowed)}{hint}")
        found[name] = values[0]
    check = found.get("ssl_check_hostname")
    if check is not None:
        if str(check).lower() not in _BOOLS:
            raise ValueError("ssl_check_hostname is neither true nor false")
        found["ssl_check_hostname"] = _BOOLS[str(check).lower()]
    return found

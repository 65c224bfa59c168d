"""The keys that JSON Web Tokens are checked with: one key in a file, a set (RFC 7517) in a file, or a set at an address."""

import asyncio
import json
import logging
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import jwt
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from rpc import clocks
from rpc.status import unavailable
from rpc.watched_files import BadFile, WatchedFiles

#: Most bytes of a set of keys, and most keys that are looked at in it.
SET_MAX_BYTES = 1024 * 1024
SET_MAX_KEYS = 128
#: Seconds for an issuer to answer.
FETCH_S = 5.0
#: Seconds between two tries to fetch a set, whatever tokens ask for: clients cannot make this router ask more often.
FETCH_EVERY_S = 10.0
#: An HMAC secret has at least so many bytes (RFC 7518, 3.2).
SECRET_MIN_BYTES = 32

_LOG = logging.getLogger("keys")


class Keys(Protocol):
    """Where keys come from."""

    async def key(self, key_id: str | None, algorithm: str) -> Any | None:
        """The key for a token's header; None when there is none. Raises StatusError (UNAVAILABLE)."""


@dataclass(slots=True)
class KeySet:
    """The usable keys of a set."""

    keys: tuple[Mapping[str, Any], ...]
    _made: dict[tuple[str | None, str], Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, content: bytes) -> "KeySet":
        """Raises ValueError, with nothing of the content."""
        try:
            said = json.loads(content)
        except (ValueError, RecursionError):
            raise ValueError("it is not JSON") from None
        keys = said.get("keys") if isinstance(said, dict) else None
        if not isinstance(keys, list):
            raise ValueError('it is no set of keys: an object with a list "keys"')
        # Symmetric keys have no place in a set that others read.
        usable = [one for one in keys if isinstance(one, dict) and one.get("kty") in ("RSA", "EC", "OKP")]
        usable = [one for one in usable if one.get("use", "sig") == "sig"]
        if not usable or len(usable) > SET_MAX_KEYS:
            raise ValueError(f"it must hold 1 to {SET_MAX_KEYS} public keys for signatures; it holds {len(usable)}")
        return cls(tuple(usable))

    def find(self, key_id: str | None, algorithm: str) -> Any | None:
        """The key by that id (without an id: the only one), if it is one for the algorithm."""
        wanted = [one for one in self.keys if key_id is None or one.get("kid") == key_id]
        if len(wanted) != 1:
            return None
        # What is known of a set is bounded: ids that are in it, algorithms that are taken.
        at = key_id, algorithm
        if at not in self._made:
            self._made[at] = _usable(wanted[0], algorithm)
        return self._made[at]


class KeyFile:
    """One key: a public key as PEM, or, for HS algorithms, a secret."""

    def __init__(self, path: str, symmetric: bool) -> None:
        """Raises BadFile."""
        self._symmetric = symmetric
        self._file: WatchedFiles[bytes] = WatchedFiles({"jwt_key_file": path}, self._load)

    async def key(self, key_id: str | None, algorithm: str) -> Any | None:
        """See `Keys`."""
        return self._file.current()

    def _load(self, contents: Mapping[str, bytes]) -> bytes:
        content = contents["jwt_key_file"].strip()
        if self._symmetric:
            if len(content) < SECRET_MIN_BYTES or content.startswith(b"-----BEGIN"):
                raise BadFile(f"jwt_key_file: for HS algorithms it must hold a secret of at least {SECRET_MIN_BYTES} bytes")
            return content
        try:
            load_pem_public_key(content)
        except Exception:  # noqa: BLE001  (the library's own errors are not listed, and tell of the content)
            raise BadFile("jwt_key_file: it must hold a public key as PEM") from None
        return content


class KeySetFile:
    """A set of keys in a file."""

    def __init__(self, path: str) -> None:
        """Raises BadFile."""
        self._file: WatchedFiles[KeySet] = WatchedFiles({"jwt_jwks_file": path}, self._load)

    async def key(self, key_id: str | None, algorithm: str) -> Any | None:
        """See `Keys`."""
        return self._file.current().find(key_id, algorithm)

    @staticmethod
    def _load(contents: Mapping[str, bytes]) -> KeySet:
        try:
            return KeySet.parse(contents["jwt_jwks_file"])
        except ValueError as bad:
            raise BadFile(f"jwt_jwks_file: {bad}") from None


class KeySetUrl:
    """A set of keys at an issuer's address, fetched again after `keep_s` seconds and for a key that is not known yet.

    While it cannot be fetched the last one counts, however old. `fetch`: gets the bytes, off the event loop.
    """

    def __init__(self, url: str, keep_s: float, fetch: Callable[[str], bytes] | None = None) -> None:
        self._url = url
        self._keep_s = keep_s
        self._fetch = fetch or fetch_set
        self._set: KeySet | None = None
        self._stale_at = 0.0
        self._tried_at: float | None = None
        self._lock = asyncio.Lock()

    async def key(self, key_id: str | None, algorithm: str) -> Any | None:
        """See `Keys`."""
        known = self._set.find(key_id, algorithm) if self._set is not None else None
        if known is None or clocks.monotonic() >= self._stale_at:
            await self._renew()
        if self._set is None:
            raise unavailable("the keys of the tokens' issuer cannot be fetched now; try again", "KEYS_UNAVAILABLE")
        return self._set.find(key_id, algorithm)

    async def _renew(self) -> None:
        async with self._lock:  # one at a time: who waited finds it tried
            now = clocks.monotonic()
            if self._tried_at is not None and now - self._tried_at < FETCH_EVERY_S:
                return
            self._tried_at = now
            try:
                async with asyncio.timeout(2 * FETCH_S):
                    content = await asyncio.to_thread(self._fetch, self._url)
                self._set = KeySet.parse(content)
                self._stale_at = clocks.monotonic() + self._keep_s
            except (OSError, TimeoutError, ValueError) as error:
                _LOG.warning("jwt_jwks_url: the set of keys cannot be fetched: %s", error)


def check_url(url: str) -> None:
    """Raises ValueError for an address that others could answer."""
    parts = urlsplit(url)
    here = parts.hostname in ("127.0.0.1", "::1", "localhost")
    if not parts.hostname or parts.username or not (parts.scheme == "https" or (parts.scheme == "http" and here)):
        raise ValueError("jwt_jwks_url must be an https:// address without a user (http:// on this machine only)")


def fetch_set(url: str) -> bytes:
    """What is at an address that `check_url` has passed; redirects are not followed. Raises OSError, ValueError."""
    context = ssl.create_default_context()
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=context))
    with opener.open(urllib.request.Request(url, headers={"Accept": "application/json"}), timeout=FETCH_S) as answer:
        content: bytes = answer.read(SET_MAX_BYTES + 1)
    if len(content) > SET_MAX_BYTES:
        raise ValueError(f"it has more than {SET_MAX_BYTES} bytes")
    return content


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _usable(one: Mapping[str, Any], algorithm: str) -> Any | None:
    """The key for an algorithm; None when it is for another, or cannot be read."""
    if one.get("alg", algorithm) != algorithm:
        return None
    try:
        return jwt.PyJWK.from_dict(dict(one), algorithm)
    except (jwt.PyJWTError, ValueError, TypeError):
        return None

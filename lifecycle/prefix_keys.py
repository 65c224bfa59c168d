"""Names of what full pages of KV hold: a chain of hashes over token ids, begun with everything else that decides the bytes. Pure.

Two pages with one key hold the same bytes, wherever they were computed. A key is made from the key of the page before it, so it
names the whole prefix, and a look-up can stop at the first key that is not there.

Everything that goes into a hash is framed by its length, so that no two identities are ever written alike.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from lifecycle.adapters import Adapter

#: 128 bits: two different prefixes of one tenant never meet by chance, and those of two tenants begin with different salts.
KEY_BYTES = 16
#: Bytes of a tenant's salt.
SALT_BYTES = 16

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """What beside the tokens and the tenant decides the bytes of a page.

    layout: fingerprint of the pages' geometry, groups and dtype included. positions: how positions enter the KV, such as the
    settings of rope. page_tokens: tokens in a page. What differs by request, its tenant and its adapter, is in the salt.
    """

    model_snapshot: str
    layout: str
    positions: str
    cache_dtype: str
    page_tokens: int

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens is {self.page_tokens}, must be at least 1")

    @property
    def digest(self) -> bytes:
        """KEY_BYTES that differ whenever any field differs."""
        fields = (self.model_snapshot, self.layout, self.positions, self.cache_dtype, str(self.page_tokens))
        return _hash(b"tandem-prefix", *(field.encode() for field in fields))


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """Makes the keys of one identity. `identity`: its digest; `page_tokens`: tokens in a page."""

    identity: bytes
    page_tokens: int

    def root(self, salt: bytes) -> bytes:
        """What a tenant's chains begin with."""
        return _hash(b"tandem-root", self.identity, salt)

    def extend(self, keys: list[bytes], salt: bytes, token_ids: Sequence[int]) -> None:
        """Append the keys of further full pages. `token_ids`: those after the tokens that `keys` name; a part of a page at
        their end has no key. Linear in `token_ids`."""
        size = self.page_tokens
        full = len(token_ids) // size
        if not full:
            return
        # A tuple: an array of bytes would take them for its memory.
        data = array("I", tuple(token_ids[: full * size])).tobytes()
        step, parent = 4 * size, keys[-1] if keys else self.root(salt)
        for start in range(0, full * step, step):
            # Both parts have one length each for an identity, so there is nothing to frame.
            parent = blake2b(parent + data[start : start + step], digest_size=KEY_BYTES).digest()
            keys.append(parent)

    def of(self, salt: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """Keys of all full pages of a prompt, in order."""
        keys: list[bytes] = []
        self.extend(keys, salt, token_ids)
        return keys


def tenant_salt(tenant: str) -> bytes:
    """What keeps the prefixes of tenants apart: made by a router from the tenant that it has authenticated, never told by a
    client."""
    return _hash(b"tandem-tenant", tenant.encode())[:SALT_BYTES]


def adapted_salt(salt: bytes, adapter: Adapter | None) -> bytes:
    """What the chains of a tenant begin with where an adapter computed the pages: another for each content of an adapter. Made by
    members and routers alike. Without an adapter, and without a salt, it is the salt."""
    return salt if adapter is None or not salt else _hash(b"tandem-adapter", salt, adapter.identity.encode())[:SALT_BYTES]


def short(key: bytes) -> int:
    """The 64 bits of a key that routers are told: enough for a hint, which may be wrong."""
    return int.from_bytes(key[:8], "little")


def _hash(*fields: bytes) -> bytes:
    digest = blake2b(digest_size=KEY_BYTES)
    for field in fields:
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    return digest.digest()

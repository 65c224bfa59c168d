"""The file of tokens and tenants: who has which token, and what each tenant may ask for. Pure: bytes in, values out.

[[tokens]]
name = "batch"                  # for logs
sha256 = "…"                    # of the token, 64 hexadecimal digits
tenant = "acme"
roles = ["operator"]            # left out: none
expires = 2030-01-01T00:00:00Z  # left out: never

[tenants.acme]                  # what is left out is as the router's settings say
requests_per_s = 5
tokens_per_s = 20000
concurrent_requests = 16
tokens = 50000                  # prompt tokens in work, and decode pages, in the whole cell
pages = 4000
"""

import datetime
import hashlib
import hmac
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.budget import Limits
from router.limits import TENANT_BYTES
from router.tenant_limits import TenantRates
from rpc.gate import OPERATOR
from rpc.watched_files import BadFile

#: Most tokens in a file.
TOKENS_MAX = 100_000
ROLES = frozenset({OPERATOR})
_RATES = tuple(one.name for one in fields(TenantRates))
#: Of a tenant's entry, and of the limits of a router.
_BUDGETS = {"tokens": "tenant_tokens", "pages": "tenant_pages"}

_Name = Annotated[str, Meta(min_length=1, max_length=TENANT_BYTES)]
_Rate = Annotated[float, Meta(gt=0, le=1e9)]
_Budget = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class _Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
    tenant: _Name
    roles: tuple[str, ...] = ()
    expires: datetime.datetime | None = None


class _Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests_per_s: _Rate | None = None
    request_burst: Annotated[float, Meta(ge=1, le=1e9)] | None = None
    tokens_per_s: _Rate | None = None
    token_burst: Annotated[float, Meta(ge=1, le=1e12)] | None = None
    concurrent_requests: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    tokens: _Budget | None = None
    pages: _Budget | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: Annotated[tuple[_Token, ...], Meta(max_length=TOKENS_MAX)] = ()
    tenants: dict[_Name, _Tenant] = {}


@dataclass(frozen=True, slots=True)
class KnownToken:
    """Whose a token is. `expires_at` in seconds since the epoch."""

    name: str
    digest: bytes
    tenant: str
    roles: frozenset[str] = frozenset()
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class TokenFile:
    """What a file says."""

    tokens: Mapping[bytes, KnownToken] = field(default_factory=dict)
    tenants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def find(self, token: str) -> KnownToken | None:
        """Whose it is, expired or not.

        Looked up by its hash, which nobody can steer towards a known one: how long that takes tells nothing of a token.
        """
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        known = self.tokens.get(digest)
        return known if known is not None and hmac.compare_digest(known.digest, digest) else None

    def rates(self, tenant: str, default: TenantRates) -> TenantRates:
        """The limits of a tenant, the default ones where the file says nothing."""
        own = self.tenants.get(tenant, {})
        return replace(default, **{name: own[name] for name in _RATES if name in own})

    def budgets(self, tenant: str, default: Limits) -> Limits:
        """The same of what it may hold."""
        own = self.tenants.get(tenant, {})
        return replace(default, **{setting: own[name] for name, setting in _BUDGETS.items() if name in own})


def parse_tokens(text: bytes, setting: str = "token_file") -> TokenFile:
    """Raises BadFile, naming the setting and the entry, with nothing of what is in the file beside that."""
    try:
        table = tomllib.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadFile(f"{setting}: it must be UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        where = str(error).rpartition("(")[2].rstrip(")")
        raise BadFile(f"{setting}: it is not valid TOML ({where})") from None
    try:
        said = msgspec.convert(table, _File)
    except msgspec.ValidationError as error:
        raise BadFile(f"{setting}: {error}") from None
    tokens: dict[bytes, KnownToken] = {}
    for number, one in enumerate(said.tokens):
        known = _known(one, f"{setting}: tokens[{number}]")
        if known.digest in tokens:
            raise BadFile(f"{setting}: tokens[{number}].sha256: {tokens[known.digest].name!r} has the same token")
        tokens[known.digest] = known
    tenants = {name: _said(one) for name, one in said.tenants.items()}
    return TokenFile(tokens, tenants)


def _known(one: _Token, where: str) -> KnownToken:
    wrong = sorted(set(one.roles) - ROLES)
    if wrong:
        raise BadFile(f"{where}.roles: there is no such role as {wrong[0][:64]!r}; there are {', '.join(sorted(ROLES))}")
    for name, text in (("name", one.name), ("tenant", one.tenant)):
        if not text.isprintable() or len(text.encode()) > TENANT_BYTES:
            raise BadFile(f"{where}.{name}: it must be at most {TENANT_BYTES} bytes of printable characters")
    expires_at = None
    if one.expires is not None:
        if one.expires.tzinfo is None:
            raise BadFile(f"{where}.expires: it needs a time zone, such as Z")
        expires_at = one.expires.timestamp()
    return KnownToken(one.name, bytes.fromhex(one.sha256), one.tenant, frozenset(one.roles), expires_at)


def _said(one: _Tenant) -> dict[str, Any]:
    return {name: value for name in one.__struct_fields__ if (value := getattr(one, name)) is not None}

"""Whose a call is: tokens of a file and JSON Web Tokens, as the settings say, and the limits of the tenants they name."""

from collections.abc import Mapping

from router.access_settings import AccessSettings
from router.budget import Limits
from router.jwt_tokens import JwtRules, JwtTokens, refused
from router.key_sets import KeyFile, Keys, KeySetFile, KeySetUrl
from router.tenant_limits import TenantLimits, TenantRates
from router.token_file import TokenFile, parse_tokens
from rpc import clocks
from rpc.gate import Caller, Kind
from rpc.status import unauthenticated
from rpc.watched_files import WatchedFiles

#: Most characters of a token: what is longer is refused unread.
TOKEN_MAX_CHARACTERS = 8192


class Access:
    """Knows clients by their tokens. Raises BadFile when it is made of files that cannot be read."""

    def __init__(self, settings: AccessSettings) -> None:
        self.required = settings.knows_clients
        self._rates = settings.tenant_rates()
        self._file: WatchedFiles[TokenFile] | None = None
        if settings.token_file:
            self._file = WatchedFiles({"token_file": settings.token_file}, _parse)
        self._jwt = _jwt(settings) if settings.knows_jwt else None

    def limits(self) -> TenantLimits:
        """Fresh counts of what tenants ask for, with the limits of the file as they are at each time."""
        return TenantLimits(self.rates)

    def rates(self, tenant: str) -> TenantRates:
        """What a tenant may ask for now."""
        return self._rates if self._file is None else self._file.current().rates(tenant, self._rates)

    def budgets(self, tenant: str, default: Limits) -> Limits:
        """What a tenant's requests may hold now; `default` for one of which the file says nothing."""
        return default if self._file is None else self._file.current().budgets(tenant, default)

    async def client(self, token: str) -> Caller:
        """Whose `token` is. Raises StatusError: UNAUTHENTICATED, with nothing of the token; UNAVAILABLE."""
        if not token:
            raise unauthenticated("a token is needed: authorization: Bearer …", "TOKEN_REQUIRED")
        if len(token) > TOKEN_MAX_CHARACTERS:
            raise refused(f"a token has at most {TOKEN_MAX_CHARACTERS} characters")
        known = self._file.current().find(token) if self._file is not None else None
        if known is None:
            if self._jwt is not None:
                return await self._jwt.know(token)
            raise refused("the token is not known")
        if known.expires_at is not None and clocks.wall() >= known.expires_at:
            raise refused("the token has expired")
        return Caller(Kind.CLIENT, known.name, known.tenant, known.roles)


def _parse(contents: Mapping[str, bytes]) -> TokenFile:
    return parse_tokens(contents["token_file"])


def _jwt(settings: AccessSettings) -> JwtTokens:
    keys: Keys
    if settings.jwt_key_file:
        keys = KeyFile(settings.jwt_key_file, symmetric=settings.jwt_algorithms[0].startswith("HS"))
    elif settings.jwt_jwks_file:
        keys = KeySetFile(settings.jwt_jwks_file)
    else:
        keys = KeySetUrl(settings.jwt_jwks_url, settings.jwt_jwks_keep_s)
    rules = JwtRules(
        settings.jwt_algorithms,
        settings.jwt_issuer,
        settings.jwt_audience,
        settings.jwt_tenant_claim,
        settings.jwt_roles_claim,
        settings.jwt_leeway_s,
    )
    return JwtTokens(rules, keys)

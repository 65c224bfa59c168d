"""Settings of a router that say whose calls it takes, and how much a tenant may ask for."""

from typing import Annotated, Literal

from router.key_sets import check_url
from router.tenant_limits import TenantRates
from rpc.server_settings import ServerSettings
from rpc.settings import setting

Algorithm = Literal["HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"]
_KEYS = ("jwt_key_file", "jwt_jwks_file", "jwt_jwks_url")


class AccessSettings(ServerSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Tokens of clients, and limits of their tenants. Without tokens nobody is asked who he is."""

    token_file: Annotated[
        str, setting("Tokens of clients and limits of tenants, TOML (docs/security.md); read again when it changes.")
    ] = ""
    jwt_key_file: Annotated[str, setting("Key of JSON Web Tokens: a public key as PEM, or a secret for HS algorithms.")] = ""
    jwt_jwks_file: Annotated[str, setting("Set of keys of JSON Web Tokens, JSON.")] = ""
    jwt_jwks_url: Annotated[str, setting("Address of such a set, https://….", max_length=2048)] = ""
    jwt_jwks_keep_s: Annotated[float, setting("The set at that address is fetched again after.", "seconds", ge=10, le=86_400)] = (
        300.0
    )
    jwt_algorithms: Annotated[
        tuple[Algorithm, ...], setting("Algorithms that are taken: HS… alone, with jwt_key_file, or others.", min_length=1)
    ] = ("RS256", "ES256")
    jwt_issuer: Annotated[str, setting("What the claim iss must be; required with any of the keys.", max_length=2048)] = ""
    jwt_audience: Annotated[str, setting("What the claim aud must hold; required with any of the keys.", max_length=2048)] = ""
    jwt_tenant_claim: Annotated[str, setting("Claim that names the tenant.", min_length=1, max_length=256)] = "tenant"
    jwt_roles_claim: Annotated[str, setting("Claim that lists roles.", min_length=1, max_length=256)] = "roles"
    jwt_leeway_s: Annotated[float, setting("How far clocks may differ.", "seconds", ge=0, le=600)] = 30.0
    tenant_requests_per_s: (
        Annotated[float, setting("Requests of one tenant, on average.", "requests a second", gt=0, le=1e9)] | None
    ) = None
    tenant_request_burst: (
        Annotated[float, setting("Requests at once after a pause; unset: those of 10 s.", "requests", ge=1, le=1e9)] | None
    ) = None
    tenant_tokens_per_s: (
        Annotated[float, setting("Tokens of one tenant, of prompts and chosen, on average.", "tokens a second", gt=0, le=1e9)]
        | None
    ) = None
    tenant_token_burst: (
        Annotated[float, setting("Tokens at once after a pause; unset: those of 10 s.", "tokens", ge=1, le=1e12)] | None
    ) = None
    tenant_concurrent_requests: (
        Annotated[int, setting("Requests of one tenant at a time.", "requests", ge=1, le=1_000_000)] | None
    ) = None

    def __post_init__(self) -> None:
        """Raises ValueError for half a configuration."""
        super().__post_init__()
        keys = [name for name in _KEYS if getattr(self, name)]
        if len(keys) > 1:
            raise ValueError(f"{keys[1]} is set beside {keys[0]}; only one of them may be")
        if keys:
            self._check_jwt(keys[0])
        if self.knows_clients and not self.knows_its_cell:
            source = "token_file" if self.token_file else keys[0]
            raise ValueError(
                f"internal_identities or cell_secret_file is required, because {source} is set: "
                "routers pass calls on to one another, and members must take none from clients"
            )

    @property
    def knows_clients(self) -> bool:
        """Whether clients need tokens."""
        return bool(self.token_file or self.knows_jwt)

    @property
    def knows_jwt(self) -> bool:
        """Whether JSON Web Tokens are taken."""
        return any(getattr(self, name) for name in _KEYS)

    def tenant_rates(self) -> TenantRates:
        """Limits of a tenant of which the token file says nothing."""
        return TenantRates(
            self.tenant_requests_per_s,
            self.tenant_request_burst,
            self.tenant_tokens_per_s,
            self.tenant_token_burst,
            self.tenant_concurrent_requests,
        )

    def _check_jwt(self, source: str) -> None:
        for name in ("jwt_issuer", "jwt_audience"):
            if not getattr(self, name):
                raise ValueError(f"{name} is required, because {source} is set")
        symmetric = [one for one in self.jwt_algorithms if one.startswith("HS")]
        if symmetric and (len(symmetric) < len(self.jwt_algorithms) or source != "jwt_key_file"):
            raise ValueError(f"jwt_algorithms: {symmetric[0]} goes with jwt_key_file, and with other HS algorithms only")
        if self.jwt_jwks_url:
            check_url(self.jwt_jwks_url)

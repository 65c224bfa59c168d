"""JSON Web Tokens (RFC 7519) of clients: which keys and algorithms count, what has to be in one, and whose it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from router.key_sets import Keys
from router.limits import TENANT_BYTES
from router.token_file import ROLES
from rpc.gate import Caller, Kind
from rpc.status import StatusError, unauthenticated

#: Algorithms that may be chosen. With HS… who can check a token can make one.
ALGORITHMS = ("HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")

#: What is said of a token that is refused, by the library's error: never what is in it.
_WORDS: tuple[tuple[type[Exception], str], ...] = (
    (jwt.ExpiredSignatureError, "the token has expired"),
    (jwt.ImmatureSignatureError, "the token is not valid yet"),
    (jwt.InvalidIssuedAtError, "the token's iat claim is not a time that has passed"),
    (jwt.InvalidAudienceError, "the token is for another audience"),
    (jwt.InvalidIssuerError, "the token is from another issuer"),
    (jwt.MissingRequiredClaimError, "the token lacks a claim that is required: exp, iss or aud"),
    (jwt.InvalidAlgorithmError, "the token is signed with an algorithm that is not taken"),
    (jwt.InvalidSignatureError, "the token's signature is wrong"),
)


@dataclass(frozen=True, slots=True)
class JwtRules:
    """What a token must say. Empty `issuer` and `audience` are not looked at; `leeway_s`: for clocks that differ, in seconds."""

    algorithms: tuple[str, ...]
    issuer: str = ""
    audience: str = ""
    tenant_claim: str = "tenant"
    roles_claim: str = "roles"
    leeway_s: float = 30.0


class JwtTokens:
    """Says whose a token is."""

    def __init__(self, rules: JwtRules, keys: Keys) -> None:
        self._rules = rules
        self._keys = keys

    async def know(self, token: str) -> Caller:
        """Raises StatusError: UNAUTHENTICATED, or UNAVAILABLE while the issuer's keys cannot be had."""
        algorithm, key_id = self._header(token)
        key = await self._keys.key(key_id, algorithm)
        if key is None:
            raise refused("the token is signed with a key that is not known")
        return self._caller(self._claims(token, key, algorithm))

    def _header(self, token: str) -> tuple[str, str | None]:
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise refused("the token is no JSON Web Token") from None
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in self._rules.algorithms:
            raise refused("the token is signed with an algorithm that is not taken")
        if key_id is not None and not isinstance(key_id, str):
            raise refused("the token is no JSON Web Token")
        return algorithm, key_id

    def _claims(self, token: str, key: Any, algorithm: str) -> Mapping[str, Any]:
        rules = self._rules
        required = ["exp", *(["iss"] if rules.issuer else []), *(["aud"] if rules.audience else [])]
        options: Any = {"require": required, "verify_aud": bool(rules.audience), "verify_iss": bool(rules.issuer)}
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=rules.audience or None,
                issuer=rules.issuer or None,
                leeway=rules.leeway_s,
                options=options,
            )
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
            # A key of another kind than the algorithm is a TypeError or a ValueError of the library.
            words = next((said for kind, said in _WORDS if isinstance(error, kind)), "the token cannot be read")
            raise refused(words) from None
        return claims

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        tenant, roles = claims.get(self._rules.tenant_claim), claims.get(self._rules.roles_claim, ())
        if not isinstance(tenant, str) or not _is_name(tenant):
            raise refused(f"the token's claim {self._rules.tenant_claim} must be 1 to {TENANT_BYTES} printable bytes of text")
        if isinstance(roles, str):
            roles = roles.split()
        if not isinstance(roles, list | tuple):
            roles = ()
        known = frozenset(role for role in roles if isinstance(role, str) and role in ROLES)
        name = claims.get("sub")
        return Caller(Kind.CLIENT, name if isinstance(name, str) and _is_name(name) else "", tenant, known)


def refused(words: str) -> StatusError:
    """A token that is not taken: UNAUTHENTICATED."""
    return unauthenticated(words, "INVALID_TOKEN")


def _is_name(text: str) -> bool:
    return bool(text) and text.isprintable() and len(text.encode("utf-8", "surrogatepass")) <= TENANT_BYTES

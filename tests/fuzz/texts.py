"""Files, tokens and settings under attack: what is wrong is refused in words, and nothing else ever happens."""

import base64
import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import strategies as st

from router.config import RouterSettings
from router.jwt_tokens import JwtRules, JwtTokens
from router.key_sets import KeySet
from router.token_file import parse_tokens
from rpc.cell_identity import bearer, secrets_in
from rpc.settings import SettingsError, load_settings
from rpc.status import StatusError
from rpc.watched_files import BadFile
from tests.fuzz.messages import mutated
from tests.fuzz.target import Target, pure

_TOKENS = f"""
[[tokens]]
name = "a"
sha256 = "{"0" * 64}"
tenant = "t"
roles = ["operator"]
expires = 2030-01-01T00:00:00Z

[tenants.t]
requests_per_s = 5
tokens_per_s = 1e3
concurrent_requests = 4
tokens = 4000
pages = 400
""".encode()


def _token_file(content: bytes) -> None:
    try:
        parse_tokens(content).find("token")
    except BadFile as bad:
        assert len(str(bad)) < 1000 and "0" * 64 not in str(bad)


def _secret_file(content: bytes) -> None:
    try:
        assert secrets_in({"cell_secret_file": content})
    except BadFile as bad:
        assert len(str(bad)) < 1000


_KEY = ec.generate_private_key(ec.SECP256R1())
_SET = {"keys": [{**jwt.algorithms.ECAlgorithm.to_jwk(_KEY.public_key(), as_dict=True), "kid": "k"}]}


class _Keys:
    """The keys of a set that is there."""

    def __init__(self) -> None:
        self._set = KeySet.parse(json.dumps(_SET).encode())

    async def key(self, key_id: str | None, algorithm: str) -> Any | None:
        return self._set.find(key_id, algorithm)


_JWT = JwtTokens(JwtRules(("ES256",), "issuer", "audience"), _Keys())
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


def _encoded(part: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


@st.composite
def _signed(draw: Any) -> str:
    """A token that is signed as it should be, and says anything."""
    claims = {"iss": "issuer", "aud": "audience", "exp": int(time.time()) + 600, "tenant": "t"}
    for name in draw(st.lists(st.sampled_from([*claims, "nbf", "iat", "roles", "sub", "jti", "crit"]), max_size=4)):
        claims[name] = draw(ANYTHING)
    headers = {"alg": "ES256", "kid": "k"}
    for name in draw(st.lists(st.sampled_from(["alg", "kid", "typ", "crit", "jwk", "jku", "x5u", "b64"]), max_size=2)):
        headers[name] = draw(ANYTHING)
    head = f"{_encoded(headers)}.{_encoded(claims)}"
    signature = jwt.algorithms.ECAlgorithm(jwt.algorithms.ECAlgorithm.SHA256).sign(head.encode(), _KEY)
    return f"{head}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


@st.composite
def _unsigned(draw: Any) -> str:
    header = draw(st.one_of(ANYTHING, st.just({"alg": "ES256", "kid": "k"})))
    return f"{_encoded(header)}.{_encoded(draw(ANYTHING))}.{draw(st.text(max_size=20))}"


def _jwt(token: str) -> None:
    try:
        caller = _driven(_JWT.know(token))
        assert caller.tenant and caller.tenant.isprintable()
    except StatusError as refused:
        assert refused.code.name == "UNAUTHENTICATED"
        assert len(token) < 8 or token not in refused.message


def _driven(coroutine: Any) -> Any:
    """The value of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def _key_set(content: bytes) -> None:
    try:
        KeySet.parse(content).find("k", "ES256")
    except ValueError as bad:
        assert len(str(bad)) < 1000


def _metadata(value: str) -> None:
    assert isinstance(bearer((("authorization", value),)), str)


_BASE = ("--decode=127.0.0.1:1", "--prefill=none", "--redis-url=redis://127.0.0.1:1/0")
_NAMES = sorted(RouterSettings.__struct_fields__)


@st.composite
def _settings_cases(draw: Any) -> tuple[list[str], dict[str, str]]:
    values = st.one_of(
        st.text(max_size=20), st.sampled_from(["0", "-1", "nan", "inf", "1e999", "true", "none", "[::1]:1", ",,,"])
    )
    flags = draw(st.lists(st.tuples(st.sampled_from(_NAMES), values), max_size=3))
    variables = draw(st.lists(st.tuples(st.sampled_from(_NAMES), values), max_size=3))
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in flags if name != "ready_fd"]
    return argv, {f"TANDEM_{name.upper()}": value for name, value in variables}


def _settings(case: tuple[list[str], dict[str, str]]) -> None:
    argv, variables = case
    try:
        load_settings(RouterSettings, [*_BASE, *argv], variables)
    except SettingsError as bad:
        assert str(bad)


TEXTS = (
    Target("token file", st.one_of(mutated(st.just(_TOKENS)), st.binary(max_size=300)), pure(_token_file)),
    Target("cell secret", st.binary(max_size=300), pure(_secret_file)),
    Target("jwt", st.one_of(_signed(), _unsigned(), st.text(max_size=100)), pure(_jwt)),
    Target(
        "key set",
        st.one_of(mutated(st.just(json.dumps(_SET).encode())), ANYTHING.map(lambda one: json.dumps(one).encode())),
        pure(_key_set),
    ),
    Target("authorization", st.text(max_size=100), pure(_metadata)),
    Target("settings", _settings_cases(), pure(_settings)),
)

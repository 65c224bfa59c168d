"""Tokens of a file and JSON Web Tokens: whose they are, and what is said of those that are not taken."""

import base64
import datetime
import hashlib
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from router.access import Access
from router.access_settings import AccessSettings
from router.budget import Limits
from router.config import RouterSettings
from router.key_sets import FETCH_EVERY_S, KeySet, KeySetUrl, check_url
from router.tenant_limits import TenantRates
from router.token_file import parse_tokens
from rpc import clocks
from rpc.gate import Caller, Kind
from rpc.status import StatusError
from rpc.watched_files import BadFile

SECRET = "a-token-that-nobody-guesses"
HASH = hashlib.sha256(SECRET.encode()).hexdigest()


def file(**changes):
    lines = {"name": '"ci"', "sha256": f'"{HASH}"', "tenant": '"acme"', **changes}
    return ("[[tokens]]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items() if value)).encode()


def test_a_token_names_its_tenant_and_roles():
    known = parse_tokens(file(roles='["operator"]')).find(SECRET)
    assert (known.name, known.tenant, known.roles) == ("ci", "acme", frozenset({"operator"}))
    assert parse_tokens(file()).find(SECRET + "x") is None
    assert parse_tokens(file()).find("\ud800") is None
    assert parse_tokens(b"").find(SECRET) is None


def test_tenants_have_limits_of_their_own_and_the_default_ones_otherwise():
    said = parse_tokens(file() + b"[tenants.acme]\nrequests_per_s = 5\nconcurrent_requests = 3\n")
    default = TenantRates(requests_per_s=1.0, tokens_per_s=100.0)
    assert said.rates("acme", default) == TenantRates(requests_per_s=5.0, tokens_per_s=100.0, concurrent_requests=3)
    assert said.rates("other", default) == default


def test_tenants_have_budgets_of_their_own_and_the_cell_has_one():
    said = parse_tokens(b"[tenants.acme]\nrequests_per_s = 5\npages = 7\n[tenants.other]\ntokens = 1_000\n")
    default = Limits(tenant_tokens=10, tenant_pages=2, total_pages=100)
    assert said.budgets("acme", default) == Limits(tenant_tokens=10, tenant_pages=7, total_pages=100)
    assert said.budgets("other", default) == Limits(tenant_tokens=1000, tenant_pages=2, total_pages=100)
    assert said.budgets("nobody", default) == default and said.rates("other", TenantRates()) == TenantRates()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (file(sha256='"abc"'), r"matching regex.*\$\.tokens\[0\]\.sha256"),
        (file(tenant=""), r"missing required field `tenant`"),
        (file(roles='["root"]'), r"tokens\[0\]\.roles: there is no such role as 'root'; there are operator"),
        (file(tenant='"a\\nb"'), r"tokens\[0\]\.tenant: it must be at most 128 bytes of printable characters"),
        (file(expires="2030-01-01T00:00:00"), "needs a time zone"),
        (file() + file(name='"again"'), r"tokens\[1\]\.sha256: 'ci' has the same token"),
        (file(token='"x"'), "unknown field `token`"),
        (b"[[tokens", r"it is not valid TOML \(at"),
        (b"\xff", "it must be UTF-8"),
        (b"[tenants.acme]\nrequests_per_s = 0\n", "requests_per_s"),
        (b"[tenants.acme]\npages = 0\n", r"int` >= 1.*pages"),
    ],
)
def test_a_file_that_is_wrong_names_the_entry_and_no_secret(content, words):
    with pytest.raises(BadFile, match=words) as bad:
        parse_tokens(content)
    assert str(bad.value).startswith("token_file: ") and HASH not in str(bad.value)


# JSON Web Tokens

RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
HMAC_SECRET = b"h" * 40


def pem(key):
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def jwks(*keys):
    """A set of public keys, by id."""
    made = []
    for key_id, algorithm, key in keys:
        make = jwt.algorithms.RSAAlgorithm if algorithm.startswith("RS") else jwt.algorithms.ECAlgorithm
        made.append({**make.to_jwk(key.public_key(), as_dict=True), "kid": key_id, "use": "sig"})
    return json.dumps({"keys": made}).encode()


def claims(**changes):
    now = int(time.time())
    said = {"iss": "https://issuer", "aud": "tandem", "exp": now + 600, "tenant": "acme", "sub": "ann", **changes}
    return {name: value for name, value in said.items() if value is not None}


@pytest.fixture
def access(tmp_path):
    """Access with the keys of a set in a file."""
    (tmp_path / "jwks.json").write_bytes(jwks(("r", "RS256", RSA_KEY), ("e", "ES256", EC_KEY)))
    return access_of(tmp_path, jwt_jwks_file=str(tmp_path / "jwks.json"))


def access_of(tmp_path, **changes):
    (tmp_path / "secret").write_text("s" * 40)
    values = {"cell_secret_file": str(tmp_path / "secret"), "jwt_issuer": "https://issuer", "jwt_audience": "tandem"}
    return Access(AccessSettings(**{**values, **changes}))


async def said_of(access, token):
    with pytest.raises(StatusError) as refused:
        await access.client(token)
    assert refused.value.code.name == "UNAUTHENTICATED", refused.value
    assert not token or token not in refused.value.message
    return refused.value.message


async def test_a_good_token_of_each_kind_of_key(access, tmp_path):
    for key, key_id, algorithm in ((RSA_KEY, "r", "RS256"), (EC_KEY, "e", "ES256")):
        token = jwt.encode(claims(roles=["operator", "other"]), key, algorithm, headers={"kid": key_id})
        assert await access.client(token) == Caller(Kind.CLIENT, "ann", "acme", frozenset({"operator"}))
    (tmp_path / "hmac").write_bytes(HMAC_SECRET)
    mine = access_of(tmp_path, jwt_key_file=str(tmp_path / "hmac"), jwt_algorithms=("HS256",))
    assert (await mine.client(jwt.encode(claims(), HMAC_SECRET, "HS256"))).tenant == "acme"
    (tmp_path / "key.pem").write_bytes(pem(RSA_KEY))
    mine = access_of(tmp_path, jwt_key_file=str(tmp_path / "key.pem"))
    assert (await mine.client(jwt.encode(claims(), RSA_KEY, "RS256"))).tenant == "acme"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exp": 1000}, "has expired"),
        ({"exp": None}, "lacks a claim"),
        ({"nbf": int(time.time()) + 3600}, "not valid yet"),
        ({"iss": "https://other"}, "another issuer"),
        ({"iss": None}, "lacks a claim"),
        ({"aud": "other"}, "another audience"),
        ({"aud": None}, "lacks a claim"),
        ({"tenant": None}, "claim tenant must be"),
        ({"tenant": ["acme"]}, "claim tenant must be"),
        ({"tenant": "a" * 129}, "claim tenant must be"),
        ({"tenant": "a\nb"}, "claim tenant must be"),
    ],
)
async def test_claims_that_are_not_right(access, changes, words):
    assert words in await said_of(access, jwt.encode(claims(**changes), RSA_KEY, "RS256", headers={"kid": "r"}))


async def test_signatures_that_prove_nothing(access, tmp_path):
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    assert "signature" in await said_of(access, jwt.encode(claims(), other, "RS256", headers={"kid": "r"}))
    assert "not known" in await said_of(access, jwt.encode(claims(), RSA_KEY, "RS256", headers={"kid": "?"}))
    assert "not known" in await said_of(access, jwt.encode(claims(), RSA_KEY, "RS256"))
    assert "not known" in await said_of(access, jwt.encode(claims(), EC_KEY, "ES256", headers={"kid": "r"}))
    assert "algorithm" in await said_of(access, jwt.encode(claims(), None, "none"))
    for algorithm in ("HS256", "none", "RS1"):
        header = base64.urlsafe_b64encode(json.dumps({"alg": algorithm, "kid": "r"}).encode()).rstrip(b"=").decode()
        body = jwt.encode(claims(), RSA_KEY, "RS256").split(".")[1]
        assert "algorithm" in await said_of(access, f"{header}.{body}.")
    # The public key as an HMAC secret is the oldest trick.
    (tmp_path / "key.pem").write_bytes(pem(RSA_KEY))
    with pytest.raises(BadFile, match="must hold a secret of at least 32 bytes"):
        access_of(tmp_path, jwt_key_file=str(tmp_path / "key.pem"), jwt_algorithms=("HS256",))


async def test_what_is_no_token(access):
    assert "a token is needed" in await said_of(access, "")
    assert "at most" in await said_of(access, "x" * 9000)
    for bad in ("x", "a.b.c", "..", "\ud800.x.y", "e30.e30.e30"):
        assert await said_of(access, bad)


async def test_a_file_beside_an_issuer_and_a_token_that_has_expired(tmp_path):
    (tmp_path / "jwks.json").write_bytes(jwks(("r", "RS256", RSA_KEY)))
    (tmp_path / "tokens.toml").write_bytes(file())
    both = {"token_file": str(tmp_path / "tokens.toml"), "jwt_jwks_file": str(tmp_path / "jwks.json")}
    mine = access_of(tmp_path, **both)
    assert (await mine.client(SECRET)).name == "ci"
    assert (await mine.client(jwt.encode(claims(), RSA_KEY, "RS256"))).name == "ann"
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC).isoformat()
    (tmp_path / "old.toml").write_bytes(file(expires=past))
    assert "expired" in await said_of(access_of(tmp_path, token_file=str(tmp_path / "old.toml")), SECRET)


class Clock:
    """Time that a test sets."""

    now = 1000.0

    def monotonic(self):
        return self.now

    def wall(self):
        return self.now


async def test_keys_at_an_address_are_fetched_when_they_must_be_and_not_more_often():
    fetched, answers = [], [jwks(("one", "RS256", RSA_KEY))]

    def fetch(url):
        fetched.append(url)
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    clock = Clock()
    with clocks.replaced_by(clock):
        keys = KeySetUrl("https://issuer/keys", 300.0, fetch)
        assert await keys.key("one", "RS256") and len(fetched) == 1
        assert await keys.key("two", "ES256") is None and len(fetched) == 1, "asked just now"
        clock.now += FETCH_EVERY_S
        answers.append(jwks(("one", "RS256", RSA_KEY), ("two", "ES256", EC_KEY)))
        assert await keys.key("two", "ES256") and len(fetched) == 2
        clock.now += 299
        assert await keys.key("one", "RS256") and len(fetched) == 2
        clock.now += 2
        answers.append(OSError("away"))
        assert await keys.key("one", "RS256") and len(fetched) == 3, "the last set counts while there is no other"
        empty = KeySetUrl("https://issuer/keys", 300.0, fetch)
        with pytest.raises(StatusError, match="KEYS_UNAVAILABLE"):
            await empty.key("one", "RS256")


def test_sets_and_addresses_that_are_refused():
    for bad in (b"", b"[]", b"{}", b'{"keys": []}', b'{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}'):
        with pytest.raises(ValueError):
            KeySet.parse(bad)
    assert KeySet.parse(b'{"keys": [{"kty": "RSA", "kid": "x", "n": "!"}]}').find("x", "RS256") is None
    for bad in ("http://issuer/keys", "file:///etc/passwd", "https://user:pw@issuer/", "issuer"):
        with pytest.raises(ValueError, match="https://"):
            check_url(bad)
    check_url("http://127.0.0.1:8080/keys")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_file": "t"}, "internal_identities or cell_secret_file is required, because token_file is set"),
        ({"jwt_key_file": "k", "cell_secret_file": "s"}, "jwt_issuer is required, because jwt_key_file is set"),
        ({"jwt_key_file": "k", "jwt_jwks_url": "https://x"}, "jwt_jwks_url is set beside jwt_key_file"),
        (
            {"jwt_key_file": "k", "jwt_issuer": "i", "jwt_audience": "a", "jwt_algorithms": ("RS256", "HS256")},
            "jwt_algorithms: HS256 goes with jwt_key_file, and with other HS algorithms only",
        ),
    ],
)
def test_half_a_configuration(changes, words):
    with pytest.raises(ValueError, match=words):
        RouterSettings(decode=("127.0.0.1:1",), prefill=("none",), redis_url="redis://127.0.0.1:1/0", **changes)

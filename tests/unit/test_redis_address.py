"""URLs of the request store: what they name, and what is said of those that name nothing."""

import re

import pytest

from router.redis_address import StoreAddress, StoreKind, parse_address
from router.redis_link import RedisSettings

SINGLE, SENTINEL, CLUSTER = StoreKind.SINGLE, StoreKind.SENTINEL, StoreKind.CLUSTER
SECRET = "5ecre7"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://", StoreAddress(SINGLE, (("localhost", 6379),))),
        ("redis://here/3", StoreAddress(SINGLE, (("here", 6379),), db=3)),
        ("rediss://[::1]:7000", StoreAddress(SINGLE, (("::1", 7000),), tls=True)),
        ("redis://:a%2Fb@here:1?db=2", StoreAddress(SINGLE, (("here", 1),), db=2, login={"password": "a/b"})),
        ("unix:///run/store.sock?db=1", StoreAddress(SINGLE, path="/run/store.sock", db=1)),
        ("unix://user:word@/run/a%20b", StoreAddress(SINGLE, path="/run/a b", login={"username": "user", "password": "word"})),
        (
            "redis-sentinel://user:a%40b@one:1,[::2],three/main/4",
            StoreAddress(
                SENTINEL,
                (("one", 1), ("::2", 26379), ("three", 26379)),
                service="main",
                db=4,
                login={"username": "user", "password": "a@b"},
            ),
        ),
        (
            "rediss-sentinel://one/main?ssl_check_hostname=false&ssl_ca_certs=/ca.pem",
            StoreAddress(
                SENTINEL,
                (("one", 26379),),
                service="main",
                tls=True,
                tls_options={"ssl_check_hostname": False, "ssl_ca_certs": "/ca.pem"},
            ),
        ),
        ("redis-cluster://one,two:7001/", StoreAddress(CLUSTER, (("one", 6379), ("two", 7001)))),
        ("rediss-cluster://one/0?client_name=r", StoreAddress(CLUSTER, (("one", 6379),), tls=True, login={"client_name": "r"})),
    ],
)
def test_every_form_is_read(url: str, address: StoreAddress) -> None:
    assert parse_address(url) == address


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "scheme '' is not one of redis, rediss, unix, redis-sentinel"),
        (f"http://u:{SECRET}@here", "scheme 'http'"),
        (f"redis://u:{SECRET}@[here", "not of the form host:port"),
        ("redis://one,two", "several hosts need redis-sentinel:// or redis-cluster://"),
        (f"redis://u:{SECRET}/x@here", "not a whole number (in passwords, / is written %2F"),
        (f"redis-sentinel://u:{SECRET}/x@here", "host:port with a port from 1 to 65535 (in passwords, / is written %2F"),
        ("redis://here:0", "host:port"),
        ("redis://here:65536", "host:port"),
        ("redis://here:", "host:port"),
        ("redis://here/one", "the database is not a whole number"),
        ("redis://here/1/2", "too many parts"),
        ("unix://here/run/store.sock", "unix:///path"),
        ("unix://", "unix:///path"),
        ("redis-sentinel://one:26379", "the name of the master is missing"),
        ("redis-sentinel://one,/main", "host:port"),
        ("redis-sentinel://one/main/x", "the database is not a whole number"),
        ("redis-cluster://one/1", "a cluster has no databases"),
        ("redis-cluster://", "host:port"),
        (f"redis://here?passwd={SECRET}", "an option is not one of db, username, password, client_name"),
        ("redis://here?ssl_ca_certs=/ca.pem", "need a rediss scheme"),
        ("rediss://here?ssl_check_hostname=maybe", "neither true nor false"),
    ],
)
def test_what_names_nothing_is_refused_in_words_without_secrets(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        parse_address(url)
    assert SECRET not in str(caught.value)
    with pytest.raises(ValueError, match=re.escape(f"redis url: {caught.value}")):
        RedisSettings(url=url)


def test_settings_do_not_show_passwords() -> None:
    shown = repr(RedisSettings(url=f"redis://u:{SECRET}@here", sentinel_password=SECRET))
    assert SECRET not in shown

"""Keys of full pages: what they depend on, and that nothing else can be written the same way."""

from dataclasses import fields, replace

import pytest

from lifecycle.adapters import Adapter
from lifecycle.prefix_keys import KEY_BYTES, SALT_BYTES, PrefixIdentity, PrefixKeys, adapted_salt, short, tenant_salt

IDENTITY = PrefixIdentity("snapshot", "ab" * 16, "rope", "bfloat16", 4)
KEYS = PrefixKeys(IDENTITY.digest, 4)
SALT = tenant_salt("tenant")


def test_only_full_pages_have_keys_and_each_names_the_whole_prefix() -> None:
    tokens = list(range(14))
    keys = KEYS.of(SALT, tokens)
    assert len(keys) == 3 and {len(key) for key in keys} == {KEY_BYTES}
    assert KEYS.of(SALT, tokens[:12]) == keys and KEYS.of(SALT, tokens[:3]) == []
    for place in range(12):
        other = KEYS.of(SALT, [*tokens[:place], 99, *tokens[place + 1 :]])
        assert other[: place // 4] == keys[: place // 4]
        assert not set(other[place // 4 :]) & set(keys)


def test_keys_can_be_made_page_by_page() -> None:
    tokens = [*range(1000, 1013)]
    keys: list[bytes] = []
    KEYS.extend(keys, SALT, tokens[:4])
    KEYS.extend(keys, SALT, tokens[4:7])
    KEYS.extend(keys, SALT, tokens[4:])
    assert keys == KEYS.of(SALT, tokens)


def test_ids_are_ids_whatever_holds_them() -> None:
    assert KEYS.of(SALT, b"12345678") == KEYS.of(SALT, list(b"12345678")) == KEYS.of(SALT, tuple(b"12345678"))


def test_every_field_of_the_identity_counts() -> None:
    changed = {
        "model_snapshot": "other",
        "layout": "cd" * 16,
        "positions": "rope with another theta",
        "cache_dtype": "float32",
        "page_tokens": 8,
    }
    assert set(changed) == {field.name for field in fields(PrefixIdentity)}
    digests = {replace(IDENTITY, **{name: value}).digest for name, value in changed.items()}
    assert len(digests | {IDENTITY.digest}) == len(changed) + 1


def test_fields_are_framed() -> None:
    """Letters that move from one field to its neighbour make another identity."""
    assert replace(IDENTITY, positions="ab", cache_dtype="c").digest != replace(IDENTITY, positions="a", cache_dtype="bc").digest
    assert KEYS.root(b"") != KEYS.root(b"\x00") != PrefixKeys(IDENTITY.digest + b"\x00", 4).root(b"")


def test_tenants_have_nothing_in_common() -> None:
    tokens = list(range(8))
    assert tenant_salt("a") == tenant_salt("a") and len(tenant_salt("")) == SALT_BYTES
    assert not set(KEYS.of(tenant_salt("a"), tokens)) & set(KEYS.of(tenant_salt("b"), tokens))
    assert len({tenant_salt(name) for name in ("", "a", "aa", "a\x00")}) == 4


def test_contents_of_adapters_have_nothing_in_common() -> None:
    tokens, first, other = list(range(8)), Adapter("lora", "aa"), Adapter("lora", "bb")
    assert adapted_salt(SALT, None) == SALT and adapted_salt(b"", first) == b""
    assert adapted_salt(SALT, first) == adapted_salt(SALT, Adapter("another name", "aa"))
    salts = [SALT, *(adapted_salt(salt, each) for salt in (SALT, tenant_salt("b")) for each in (first, other))]
    assert {len(salt) for salt in salts} == {SALT_BYTES}
    assert len({key for salt in salts for key in KEYS.of(salt, tokens)}) == 2 * len(salts)


def test_what_routers_are_told_is_a_part_of_the_key() -> None:
    (key,) = KEYS.of(SALT, range(4))
    assert short(key) == int.from_bytes(key[:8], "little") < 2**64


def test_a_page_has_tokens() -> None:
    with pytest.raises(ValueError, match="page_tokens is 0"):
        replace(IDENTITY, page_tokens=0)

"""Which schemas are refused, and that the words say what and where."""

import json
from typing import Any

import pytest

from text.errors import BadGrammar
from text.grammar_rule import MAX_GRAMMAR_BYTES, GrammarKind, GrammarRule
from text.json_schema import MAX_SCHEMA_DEPTH, check_schema, enforced, parse_json


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


X, Y = ({"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in ("x", "y"))

REFUSED: list[tuple[Any, str]] = [
    (3, "object, true or false at #"),
    ({"type": "object", "properties": {"a": {"not": {}}}}, "not at #/properties/a cannot"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems at #"),
    ({"type": "integer", "multipleOf": 5}, "multipleOf"),
    ({"type": "object", "patternProperties": {}}, "patternProperties"),
    ({"minLength": 3}, 'minLength at # needs the type beside it, such as {"type": "string"}'),
    ({"properties": {}}, '{"type": "object"}'),
    ({"type": "strin"}, "type at # must be one or more of"),
    ({"type": "string", "minLength": -1}, "whole number from 0"),
    ({"type": "string", "maxLength": 10**6}, "whole number from 0"),
    ({"type": "string", "maxLength": True}, "whole number from 0"),
    ({"type": "number", "minimum": "3"}, "minimum at # must be a number"),
    ({"anyOf": [{"type": "string"}], "type": "string"}, "anyOf and type at #"),
    ({"anyOf": [{"type": "string"}], "oneOf": [{}]}, "anyOf and oneOf at #"),
    ({"anyOf": []}, "anyOf at # must be a list"),
    ({"enum": [1], "minimum": 0}, "enum and minimum"),
    ({"enum": []}, "enum at # must be a list"),
    ({"enum": [1, "a"], "type": "string"}, "1 at # is not of the type"),
    ({"const": 1.5, "type": "integer"}, "1.5 at # is not of the type"),
    ({"allOf": [{}, {}]}, "allOf at # can be enforced with one schema only; got 2"),
    ({"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}, "could fit both 0 and 1"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "could fit both 0 and 1"),
    ({"oneOf": [X, Y, {"type": "object"}]}, "could fit both 0 and 2"),
    ({"$ref": "#/$defs/a"}, "leads nowhere: #/$defs/a"),
    ({"$ref": "http://x/y"}, "must be a JSON pointer"),
    ({"$ref": "#", "type": "string"}, "$ref and type"),
    ({"type": "object", "required": ["a"]}, "names 'a', which is not in properties"),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}}, "beside properties"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": {"$id": "x"}}}, "$id at #/properties/a"),
    ({"type": "string", "pattern": "a", "minLength": 1}, "pattern and minLength"),
    ({"type": "string", "format": "date", "maxLength": 1}, "format and maxLength"),
    ({"type": "string", "pattern": 'say "a"'}, "at 4"),
    ({"type": "string", "pattern": "a\\\\"}, "at 1"),
    ({"type": "string", "pattern": "[\\n]"}, "at 1"),
    ({"type": "string", "pattern": "é."}, "at 0"),
    ({"type": "string", "pattern": "a$|b"}, "at 1"),
    ({"type": "string", "pattern": "a++"}, "at 2"),
    ({"type": "string", "pattern": "(?i)a"}, "at 2"),
    ({"type": "string", "pattern": "(?=a)"}, "at 2"),
    (deep(MAX_SCHEMA_DEPTH + 1), "more than 64 schemas deep"),
    ({"enum": list(range(3)), "$defs": {str(n): {} for n in range(5000)}}, "more than 4096 schemas"),
]


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: Any, says: str) -> None:
    with pytest.raises(BadGrammar) as bad:
        check_schema(schema)
    assert says in str(bad.value)


ACCEPTED: list[Any] = [
    True,
    {},
    {"type": "array", "uniqueItems": False, "items": True},
    {"oneOf": [X, Y, {"type": "array"}, {"const": 1}, {"const": "1"}]},
    {"oneOf": [{"$ref": "#/$defs/x"}, Y], "$defs": {"x": X}},
    {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1},
    {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": True, "minProperties": 2},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "x", "title": "t", "nullable": True, "type": "null"},
    {"type": ["integer", "null"], "minimum": 1, "description": "d"},
    {"type": "string", "pattern": "^(?:a|b)[^x\\]]+?\\.\\d$"},
    {"enum": [1, 2.0], "type": "integer"},
    deep(MAX_SCHEMA_DEPTH),
]


@pytest.mark.parametrize("schema", ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_can_be_enforced_passes(schema: Any) -> None:
    check_schema(schema)


def test_an_object_that_names_properties_has_no_others() -> None:
    inner = {"type": "object", "properties": {"a": {}}, "additionalProperties": True}
    closed = {**inner, "additionalProperties": False}
    schema = {
        "type": "object",
        "properties": {"properties": inner, "x": {"anyOf": [inner, {"enum": [inner]}]}},
        "$defs": {"d": inner},
    }
    assert json.loads(enforced(json.dumps(schema))) == {
        "type": "object",
        "properties": {"properties": closed, "x": {"anyOf": [closed, {"enum": [inner]}]}},
        "$defs": {"d": closed},
        "additionalProperties": False,
    }
    free = {"type": "object", "additionalProperties": {"type": "array", "items": inner, "prefixItems": [inner]}}
    assert json.loads(enforced(json.dumps(free))) == {
        "type": "object",
        "additionalProperties": {"type": "array", "items": closed, "prefixItems": [closed]},
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a":\n  }', "line 2, column 3"),
        ('{"minimum": NaN}', "NaN is no JSON value"),
        ("[" * 100_000, "too deeply"),
        ('{"a": 1} x', "column 10"),
    ],
)
def test_text_that_is_no_json_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(BadGrammar) as bad:
        parse_json(text)
    assert says in str(bad.value)


def test_the_size_of_a_rule_is_bounded() -> None:
    GrammarRule(GrammarKind.REGEX, "é" * (MAX_GRAMMAR_BYTES // 2))
    for text, says in (
        ("", "1 to 65536 bytes; got 0"),
        ("é" * (MAX_GRAMMAR_BYTES // 2) + "a", "got 65537"),
        ("a\0b", "NUL character at 1"),
    ):
        with pytest.raises(BadGrammar) as bad:
            GrammarRule(GrammarKind.REGEX, text)
        assert says in str(bad.value)
    with pytest.raises(ValueError, match="no text"):
        GrammarRule(GrammarKind.JSON_OBJECT, "a")


def test_kind_and_text_make_the_digest() -> None:
    digests = {GrammarRule(kind, "a").digest for kind in (GrammarKind.REGEX, GrammarKind.EBNF)}
    assert len(digests | {GrammarRule(GrammarKind.REGEX, "b").digest, GrammarRule(GrammarKind.JSON_OBJECT).digest}) == 4

"""Which JSON schemas can be enforced token by token, so that whatever is generated under them validates. Pure.

The compiler of grammars leaves out keywords, or combinations of them, that it cannot express, without a word. Here they are
refused, by name and place (a JSON pointer). Words that JSON Schema does not know are annotations and pass.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

from text.errors import BadGrammar

#: Deepest nesting of schemas, and most schemas in one.
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMAS = 4096
#: Largest of minLength, maxLength, minItems, maxItems, minProperties and maxProperties: a grammar counts in its states.
MAX_SCHEMA_COUNT = 10_000

#: Keywords that are enforced, by the type that they are about.
_BY_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
}
_TYPES = frozenset({"string", "number", "integer", "array", "object", "boolean", "null"})
_ABOUT_TYPES = frozenset[str]().union(*_BY_TYPE.values())
#: Keywords that say everything by themselves: beside them none of the above.
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
#: Keywords of JSON Schema that cannot be enforced.
_REFUSED = frozenset(
    {
        *("not", "if", "then", "else", "multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("patternProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems"),
        *("unevaluatedProperties", "additionalItems", "$dynamicRef", "$recursiveRef"),
    }
)
#: Keywords with schemas inside: by name, one, a list of them.
_NAMED = ("$defs", "definitions", "properties")
_SINGLE = ("items", "additionalProperties")
_LISTED = ("prefixItems", "anyOf", "oneOf", "allOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises BadGrammar with line and column."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as wrong:
        raise BadGrammar(f"is not JSON: {wrong.msg} at line {wrong.lineno}, column {wrong.colno}") from None
    except RecursionError:
        raise BadGrammar("is nested too deeply to be read") from None


def check_schema(schema: Any) -> None:
    """Raises BadGrammar, naming the first keyword that cannot be enforced and where it stands."""
    _Walk(schema).schema(schema, "#", 0)


def enforced(text: str) -> str:
    """A schema that was checked, as it is compiled: an object that names properties has no others.

    Others could not be told from them: the library lets their names be written with escapes.
    """
    return json.dumps(_closed(json.loads(text)), ensure_ascii=False)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = {word: _closed_inside(word, value) for word, value in schema.items()}
    if schema.get("properties"):
        closed["additionalProperties"] = False
    return closed


def _closed_inside(word: str, value: Any) -> Any:
    if word in _NAMED and isinstance(value, dict):
        return {name: _closed(inner) for name, inner in value.items()}
    if word in _SINGLE:
        return _closed(value)
    if word in _LISTED and isinstance(value, list):
        return [_closed(inner) for inner in value]
    return value


def _no_constant(name: str) -> Any:
    raise BadGrammar(f"is not JSON: {name} is no JSON value")


class _Walk:
    """One look at a whole schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._seen = 0

    def schema(self, schema: Any, at: str, depth: int) -> None:
        self._seen += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise BadGrammar(f"is nested more than {MAX_SCHEMA_DEPTH} schemas deep at {at}")
        if self._seen > MAX_SCHEMAS:
            raise BadGrammar(f"has more than {MAX_SCHEMAS} schemas")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise BadGrammar(f"must be an object, true or false at {at}")
        _check_words(schema, at)
        if "$ref" in schema:
            self._resolve(schema["$ref"], at)
        _check_types(schema, at)
        _check_values(schema, at)
        _check_counts(schema, at)
        _check_object(schema, at)
        if "oneOf" in schema:
            self._check_disjoint(schema["oneOf"], f"{at}/oneOf")
        for place, inner in _inner(schema, at):
            self.schema(inner, place, depth + 1)

    def _resolve(self, reference: Any, at: str) -> Any:
        """The schema that a reference within this document means."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise BadGrammar(f"$ref at {at} must be a JSON pointer into this schema, such as #/$defs/name")
        found = self._root
        for step in reference.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or step not in found:
                raise BadGrammar(f"$ref at {at} leads nowhere: {reference}")
            found = found[step]
        return found

    def _behind(self, schema: Any) -> Any:
        """What a schema that is only a reference stands for; itself where there is no end to it."""
        for _ in range(MAX_SCHEMA_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._resolve(schema["$ref"], "#")
        return schema

    def _check_disjoint(self, options: Any, at: str) -> None:
        """oneOf is enforced as anyOf, which is the same only if no value fits two of them."""
        if not isinstance(options, list):
            return
        for (first, one), (second, other) in combinations(enumerate(options), 2):
            if not self._disjoint(self._behind(one), self._behind(other)):
                raise BadGrammar(
                    f"oneOf at {at}: a value could fit both {first} and {second}; tell them apart by type, or by a required "
                    "property with a const of its own, or write anyOf"
                )

    def _disjoint(self, one: Any, other: Any) -> bool:
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        if not _json_types(one) & _json_types(other):
            return True
        first, second = _values(one), _values(other)
        if first is not None and second is not None:
            return not first & second
        if "object" not in _json_types(one) & _json_types(other) or len(_json_types(one) & _json_types(other)) > 1:
            return False
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        mine, theirs = one.get("properties", {}), other.get("properties", {})
        for name in shared:
            left, right = _values(self._behind(mine.get(name))), _values(self._behind(theirs.get(name)))
            if left is not None and right is not None and not left & right:
                return True
        return False


def _check_words(schema: Mapping[str, Any], at: str) -> None:
    for word in sorted(_REFUSED & schema.keys()):
        if word == "uniqueItems" and schema[word] is False:
            continue
        raise BadGrammar(f"{word} at {at} cannot be enforced")
    if "$id" in schema and at != "#":
        raise BadGrammar(f"$id at {at} can only stand at the root")
    alone = [word for word in _ALONE if word in schema]
    beside = sorted(_ABOUT_TYPES & schema.keys())
    if len(alone) > 1:
        raise BadGrammar(f"{alone[0]} and {alone[1]} at {at} cannot be enforced together")
    if alone and (beside or ("type" in schema and alone[0] not in ("const", "enum"))):
        raise BadGrammar(f"{alone[0]} and {(beside or ['type'])[0]} at {at} cannot be enforced together")
    for word in _LISTED:
        if word in schema and (not isinstance(schema[word], list) or not schema[word]):
            raise BadGrammar(f"{word} at {at} must be a list with at least one schema")
    if len(schema.get("allOf", ())) > 1:
        raise BadGrammar(f"allOf at {at} can be enforced with one schema only; got {len(schema['allOf'])}")


def _check_types(schema: Mapping[str, Any], at: str) -> None:
    beside = sorted(_ABOUT_TYPES & schema.keys())
    if "type" not in schema:
        if beside:
            raise BadGrammar(f"{beside[0]} at {at} needs the type beside it, such as {json.dumps(_type_of(beside[0]))}")
        return
    types = _type_list(schema)
    if not types or not all(isinstance(one, str) and one in _TYPES for one in types):
        raise BadGrammar(f"type at {at} must be one or more of {', '.join(sorted(_TYPES))}")
    together = [word for word in ("pattern", "format", "minLength", "maxLength") if word in schema]
    if together[:1] in (["pattern"], ["format"]) and len(together) > 1:
        raise BadGrammar(f"{together[0]} and {together[1]} at {at} cannot be enforced together")
    if "pattern" in schema:
        _check_pattern(schema["pattern"], at)


def _check_pattern(pattern: Any, at: str) -> None:
    """What is generated is the whole of the pattern. An anchor inside it would be left out, and what JSON writes with an escape
    would not be escaped, nor would anything in a pattern that has such a character, or one beyond ASCII."""
    if not isinstance(pattern, str):
        raise BadGrammar(f"pattern at {at} must be a string")
    before, group = "", False
    for place, atom, inside in _atoms(pattern):
        written = atom.isascii() and atom.isprintable() and atom != '"'
        escape = len(atom) == 2 and (atom[1] in '"\\' or (atom[1].isalnum() and atom[1] not in "dDwWsS"))
        anchor = not inside and ((atom == "^" and place > 0) or (atom == "$" and place < len(pattern) - 1))
        special = (group and atom != ":") or (not inside and atom == "+" and before in ("+", "*", "?", "}"))
        if not written or escape or anchor or special:
            raise BadGrammar(f"pattern at {at} has {json.dumps(atom)} at {place}, which cannot be enforced there")
        group = not inside and before == "(" and atom == "?"
        before = "" if inside else atom


def _atoms(pattern: str) -> Iterator[tuple[int, str, bool]]:
    """The characters of a pattern, escaped ones with their backslash: place, text, and whether it stands in brackets."""
    place, inside = 0, False
    while place < len(pattern):
        atom = pattern[place : place + (2 if pattern[place] == "\\" else 1)]
        if inside and atom == "]":
            inside = False
        yield place, atom, inside
        if atom == "[":
            inside = True
        place += len(atom)


def _check_values(schema: Mapping[str, Any], at: str) -> None:
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise BadGrammar(f"enum at {at} must be a list with at least one value")
    if "type" in schema:
        fitting = {"number"} | {"integer"} if "number" in _type_list(schema) else set[str]()
        fitting |= set(_type_list(schema))
        for value in [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]:
            if _type_of_value(value) not in fitting:
                raise BadGrammar(f"{json.dumps(value)[:40]} at {at} is not of the type beside it")
    for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if word in schema and (isinstance(schema[word], bool) or not isinstance(schema[word], int | float)):
            raise BadGrammar(f"{word} at {at} must be a number")


def _check_counts(schema: Mapping[str, Any], at: str) -> None:
    for word in _COUNTS:
        if word in schema:
            value = schema[word]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SCHEMA_COUNT:
                raise BadGrammar(f"{word} at {at} must be a whole number from 0 to {MAX_SCHEMA_COUNT}")


def _check_object(schema: Mapping[str, Any], at: str) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        raise BadGrammar(f"properties at {at} must be an object")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise BadGrammar(f"required at {at} must be a list of names")
    missing = [name for name in required if name not in properties]
    if missing:
        raise BadGrammar(f"required at {at} names {missing[0]!r}, which is not in properties")
    if properties and schema.get("additionalProperties", False) not in (True, False, {}):
        raise BadGrammar(f"additionalProperties with a schema beside properties at {at} cannot be enforced")
    # A name that is written twice counts once; only declared names are never written twice.
    if schema.get("minProperties", 0) > 1 and not properties:
        raise BadGrammar(f"minProperties at {at} can be enforced only beside properties, or as 1")


def _inner(schema: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    """Schemas within a schema, with their places."""
    for word in _NAMED:
        named = schema.get(word, {})
        if not isinstance(named, dict):
            raise BadGrammar(f"{word} at {at} must be an object")
        for name, inner in named.items():
            step = name.replace("~", "~0").replace("/", "~1")
            yield f"{at}/{word}/{step}", inner
    for word in _SINGLE:
        if word in schema:
            yield f"{at}/{word}", schema[word]
    for word in _LISTED:
        for index, inner in enumerate(schema.get(word, ())):
            yield f"{at}/{word}/{index}", inner


def _type_list(schema: Mapping[str, Any]) -> list[Any]:
    types = schema["type"]
    return types if isinstance(types, list) else [types]


def _type_of(word: str) -> dict[str, str]:
    return {"type": next(name for name, words in _BY_TYPE.items() if word in words)}


def _type_of_value(value: Any) -> str:
    if value is None:
        return "null"
    by_class: Iterable[tuple[type, str]] = (
        *((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")),
        (dict, "object"),
    )
    name = next(name for kind, name in by_class if isinstance(value, kind))
    return "integer" if isinstance(value, float) and value.is_integer() else name


def _as_number(name: str) -> str:
    return "number" if name == "integer" else name


def _json_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Types that a value can have; integers are numbers."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_as_number(_type_of_value(value)) for value in values)
    if "type" not in schema:
        return frozenset(_as_number(name) for name in _TYPES)
    return frozenset(_as_number(name) for name in _type_list(schema) if isinstance(name, str))


def _values(schema: Any) -> frozenset[str] | None:
    """All values that a schema has, as JSON; None where it does not list them."""
    if not isinstance(schema, dict):
        return None
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(listed, list):
        return None
    return frozenset(json.dumps(_canonical(value), sort_keys=True) for value in listed)


def _canonical(value: Any) -> Any:
    """Equal JSON values, such as 1 and 1.0, become the same."""
    if isinstance(value, list):
        return [_canonical(one) for one in value]
    if isinstance(value, dict):
        return {name: _canonical(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value

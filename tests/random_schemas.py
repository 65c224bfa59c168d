"""Random JSON schemas that can be enforced, with everything that may stand in them."""

import json
import random
from typing import Any

_WORDS = ("a", "b", "name", 'quo"te', "é", "new\nline", "tab\t", "back\\slash", "日本", "0", " ")
_PATTERNS = (
    *(
        "^[a-c]{2,4}$",
        "a|bc",
        "[^x]+",
        "\\d{3}-\\d{4}",
        "[\\w.]+@[a-z]+\\.com",
        "(?:ab)*c?",
        "\\S{1,5}",
        ".{2,6}",
        "x\\.y",
        "\\D\\W?",
    ),
    *("[A-Z][a-z]*( [A-Z][a-z]*)*", "\\{\\}", "-?[0-9]+", "^$"),
)
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "made-up")
_SCALARS: tuple[Any, ...] = (None, True, False, 0, 1, -3, 2.5, 1e20, "", "x", *_WORDS)


class SchemaMaker:
    """Makes schemas from a seed. `schema()` is a whole one, with definitions that may refer to themselves."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: list[str] = []

    def schema(self) -> dict[str, Any]:
        """One that refuses some values and accepts others."""
        pick = self._random
        names = ["one", "two"][: pick.randrange(3)]
        definitions = {}
        for name in names:
            definitions[name] = self._closed_object(1)
            self._definitions.append(name)
        if names and pick.random() < 0.5:
            # A list of itself, with an end.
            definitions[names[0]] = {
                "type": "object",
                "properties": {"v": self._scalar(), "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{names[0]}"}]}},
                "required": ["v", "next"],
            }
        made = self._any(0)
        return {**made, "$defs": definitions} if definitions else made

    def _any(self, depth: int) -> dict[str, Any]:
        pick = self._random
        kinds = [self._scalar, self._values, self._types]
        if depth < 3:
            kinds += [
                *(lambda: self._closed_object(depth + 1), lambda: self._array(depth + 1), lambda: self._open_object(depth + 1)),
                *(lambda: self._choice(depth + 1), lambda: self._tuple(depth + 1), lambda: self._closed_object(depth + 1)),
            ]
        if self._definitions:
            kinds.append(lambda: {"$ref": f"#/$defs/{pick.choice(self._definitions)}"})
        made = pick.choice(kinds)()
        return {**made, "description": "words"} if pick.random() < 0.1 else made

    def _scalar(self) -> dict[str, Any]:
        return self._random.choice([self._string, self._number, self._integer, lambda: {"type": "boolean"}])()

    def _string(self) -> dict[str, Any]:
        pick, made = self._random, {"type": "string"}
        how = pick.randrange(5)
        if how == 0:
            return {**made, "pattern": pick.choice(_PATTERNS)}
        if how == 1:
            return {**made, "format": pick.choice(_FORMATS)}
        if how in (2, 3):
            low = pick.randrange(4)
            return {**made, **self._some(minLength=low, maxLength=low + pick.randrange(4))}
        return made

    def _number(self) -> dict[str, Any]:
        low = self._random.choice([-2.5, 0, 0.1, 3, -100])
        high = low + self._random.choice([0.5, 1, 7.25, 1000])
        names = self._random.choice(
            [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"), ("minimum", "exclusiveMaximum")]
        )
        return {"type": "number", **self._some(**{names[0]: low, names[1]: high})}

    def _integer(self) -> dict[str, Any]:
        low = self._random.choice([-17, -1, 0, 5, 99])
        return {"type": "integer", **self._some(minimum=low, maximum=low + self._random.choice([2, 13, 1000]))}

    def _values(self) -> dict[str, Any]:
        pick = self._random
        if pick.random() < 0.3:
            return {"const": pick.choice([*_SCALARS, [1, "a", None], {"k": [True], "é": {}}])}
        return {"enum": pick.sample([*_SCALARS, [], {}, [1, [2]], {"a": 1, "b": "x"}], pick.randrange(1, 5))}

    def _types(self) -> dict[str, Any]:
        pick = self._random
        types = pick.sample(["null", "boolean", "integer", "string"], pick.randrange(1, 4))
        bounds = self._some(minimum=3, maxLength=4)
        keep = {word: value for word, value in bounds.items() if {"minimum": "integer", "maxLength": "string"}[word] in types}
        return {"type": types, **keep}

    def _closed_object(self, depth: int) -> dict[str, Any]:
        pick = self._random
        names = pick.sample(_WORDS, pick.randrange(1, 5))
        made = {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": pick.sample(names, pick.randrange(len(names) + 1)),
        }
        least = pick.randrange(len(names) + 1)
        more = self._some(
            additionalProperties=pick.random() < 0.5, minProperties=least, maxProperties=pick.randint(least, len(names))
        )
        if more.get("maxProperties", 9) < len(made["required"]):
            del more["maxProperties"]
        return {**made, **more}

    def _open_object(self, depth: int) -> dict[str, Any]:
        most = self._random.randrange(1, 3)
        return {"type": "object", "additionalProperties": self._any(depth), **self._some(minProperties=1, maxProperties=most)}

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._random.randrange(3)
        return {"type": "array", "items": self._any(depth), **self._some(minItems=low, maxItems=low + self._random.randrange(3))}

    def _tuple(self, depth: int) -> dict[str, Any]:
        first = [self._any(depth) for _ in range(self._random.randrange(1, 4))]
        rest = {"items": self._random.choice([False, self._scalar()])} if self._random.random() < 0.5 else {}
        return {"type": "array", "prefixItems": first, **rest}

    def _choice(self, depth: int) -> dict[str, Any]:
        pick = self._random
        if pick.random() < 0.5:
            return (
                {pick.choice(["anyOf", "allOf"]): [self._any(depth)]}
                if pick.random() < 0.3
                else {"anyOf": [self._any(depth) for _ in range(pick.randrange(1, 4))]}
            )
        if pick.random() < 0.5:
            return {"oneOf": [self._string(), self._integer(), {"type": "null"}]}
        options = [
            {"type": "object", "properties": {"kind": {"const": kind}, "v": self._any(depth)}, "required": ["kind"]}
            for kind in pick.sample(["x", "y", 1, None], 2)
        ]
        return {"oneOf": options}

    def _some(self, **bounds: Any) -> dict[str, Any]:
        return {word: value for word, value in bounds.items() if self._random.random() < 0.6}


def text_of(schema: dict[str, Any]) -> str:
    """As a client sends it."""
    return json.dumps(schema, ensure_ascii=False)

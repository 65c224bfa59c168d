"""What an output must be, from the several ways in which clients say it. Pure."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from router.http.fields import Asked, ResponseFormat, StructuredOutputs
from rpc.details import Violation
from tandem.v1 import inference_pb2 as pb

_FORMATS = "text, json_object and json_schema"


@dataclass(frozen=True, slots=True)
class Rule:
    """A grammar and the client's name of the field that it was in."""

    param: str
    grammar: pb.Grammar


class BadRule(Exception):
    """A field that says no rule. `violation` tells which and why."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.description)
        self.violation = violation


def rule_of(body: Asked) -> Rule | None:
    """The one rule of a body; None leaves the output free. Raises BadRule, also for two of them."""
    found = [*_of_format(body.response_format), *_of_structured(body.structured_outputs)]
    for name, make in _GUIDED.items():
        value = getattr(body, f"guided_{name}")
        if value is not None:
            found.append(Rule(f"guided_{name}", make(value, f"guided_{name}")))
    if len(found) > 1:
        words = f"goes not with {found[0].param}: an output is under one rule"
        raise BadRule(Violation(found[1].param, words, "UNEXPECTED"))
    return found[0] if found else None


def _of_format(wanted: ResponseFormat | None) -> list[Rule]:
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [Rule("response_format", pb.Grammar(json_object=pb.JsonObject()))]
    if wanted.type != "json_schema":
        raise BadRule(Violation("response_format.type", f"must be one of {_FORMATS}; got {wanted.type[:64]!r}", "UNKNOWN_VALUE"))
    path = "response_format.json_schema.schema"
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise BadRule(Violation(path, "must be there with the type json_schema", "EMPTY"))
    return [Rule(path, _schema(wanted.json_schema.schema, path))]


def _of_structured(wanted: StructuredOutputs | None) -> list[Rule]:
    if wanted is None:
        return []
    if wanted.structural_tag is not None:
        raise BadRule(Violation("structured_outputs.structural_tag", "is not supported", "UNSUPPORTED"))
    found = []
    for name, make in _GUIDED.items():
        value = getattr(wanted, name)
        if value is not None:
            path = f"structured_outputs.{name}"
            found.append(Rule(path, make(value, path)))
    if wanted.json_object:
        found.append(Rule("structured_outputs.json_object", pb.Grammar(json_object=pb.JsonObject())))
    return found


def _schema(value: dict[str, Any] | bool | str, path: str) -> pb.Grammar:
    try:
        return pb.Grammar(json_schema=value if isinstance(value, str) else json.dumps(value))
    except RecursionError:
        raise BadRule(Violation(path, "is nested too deeply", "OUT_OF_RANGE")) from None


def _regex(value: str, path: str) -> pb.Grammar:
    return pb.Grammar(regex=value)


def _choice(value: Sequence[str], path: str) -> pb.Grammar:
    """One of some texts, as a grammar: its quoted texts escape as JSON's do."""
    if not value or not all(value):
        raise BadRule(Violation(path, "must have at least 1 text, and none that is empty", "EMPTY"))
    return pb.Grammar(ebnf="root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value))


def _ebnf(value: str, path: str) -> pb.Grammar:
    return pb.Grammar(ebnf=value)


_GUIDED: dict[str, Callable[[Any, str], pb.Grammar]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
}

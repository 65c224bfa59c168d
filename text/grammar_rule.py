"""What a request's output must be, as checked values: a JSON schema, a regular expression, an EBNF grammar, any JSON object.

Checked here is what can be seen without a tokenizer: sizes, JSON, and whether every keyword of a schema can be enforced.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

from text.errors import BadGrammar
from text.json_schema import check_schema, parse_json

#: Most bytes of a schema, an expression or a grammar, as UTF-8.
MAX_GRAMMAR_BYTES = 64 * 1024


class GrammarKind(Enum):
    """How the rule is written. The values are the fields of tandem.v1.Grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    JSON_OBJECT = "json_object"


@dataclass(frozen=True, slots=True)
class GrammarRule:
    """One rule. `text` is empty for JSON_OBJECT. Raises BadGrammar, naming the place as far as it is known."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        size = len(self.text.encode())
        if self.kind is GrammarKind.JSON_OBJECT:
            if self.text:
                raise ValueError("a rule of kind JSON_OBJECT has no text")
            return
        if not 1 <= size <= MAX_GRAMMAR_BYTES:
            raise BadGrammar(f"must have 1 to {MAX_GRAMMAR_BYTES} bytes; got {size}")
        if "\0" in self.text:
            raise BadGrammar(f"has a NUL character at {self.text.index(chr(0))}")
        if self.kind is GrammarKind.JSON_SCHEMA:
            check_schema(parse_json(self.text))

    @property
    def digest(self) -> str:
        """A hash over kind and text, 64 hex digits."""
        return hashlib.sha256(f"{self.kind.value}:{self.text}".encode()).hexdigest()


def rule_from(message: Any) -> GrammarRule:
    """The rule of a tandem.v1.Grammar. Raises BadGrammar."""
    name = message.WhichOneof("rule")
    if name is None:
        raise BadGrammar(f"must have one of {', '.join(kind.value for kind in GrammarKind)}")
    kind = GrammarKind(name)
    return GrammarRule(kind, "" if kind is GrammarKind.JSON_OBJECT else getattr(message, name))

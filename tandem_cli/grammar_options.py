"""The options of `tandem generate` that say what the output must be."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.v1 import inference_pb2 as pb
from tandem_cli.exits import Exit, Failure

JsonSchema = Annotated[
    Path | None, typer.Option("--json-schema", metavar="FILE", help="The output is JSON that validates under the schema in FILE.")
]
Regex = Annotated[str | None, typer.Option("--regex", help="The whole output matches this regular expression.")]
Ebnf = Annotated[
    Path | None,
    typer.Option("--grammar", metavar="FILE", help="The output follows the EBNF grammar in FILE; its first rule is root."),
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="The output is any JSON object.")]


def grammar_of(json_schema: Path | None, regex: str | None, ebnf: Path | None, json_object: bool) -> pb.Grammar | None:
    """What the options ask for; None without any. Raises Failure."""
    given = {"--json-schema": json_schema, "--regex": regex, "--grammar": ebnf, "--json-object": json_object or None}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise Failure(Exit.BAD_INPUT, f"{names[0]} and {names[1]} cannot be used together")
    if json_object:
        return pb.Grammar(json_object=pb.JsonObject())
    if json_schema is not None:
        return pb.Grammar(json_schema=_read("--json-schema", json_schema))
    if ebnf is not None:
        return pb.Grammar(ebnf=_read("--grammar", ebnf))
    if regex is None:
        return None
    try:
        return pb.Grammar(regex=regex)
    except UnicodeError:
        raise Failure(Exit.BAD_INPUT, "--regex: the text is not UTF-8") from None


def _read(option: str, path: Path) -> Any:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Failure(Exit.BAD_INPUT, f"{option}: {path} is not UTF-8: byte {error.start} cannot be read") from None
    except OSError as error:
        raise Failure(Exit.BAD_INPUT, f"{option}: {path} cannot be read: {error.strerror}") from None

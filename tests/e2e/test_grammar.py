"""Outputs under grammars, from the command line to a real model and back."""

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest

from tandem_cli.cell import Cell
from tandem_cli.exits import Exit
from tests.e2e.test_cli import run

pytestmark = pytest.mark.slow

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["city", "people"],
}


async def test_every_way_to_ask_for_a_form(f32_cell: Cell, tmp_path: Path) -> None:
    at = ("generate", "--address", f32_cell.address, "--seed", "3", "-n", "200", "--json")
    schema, ebnf, bad = tmp_path / "city.json", tmp_path / "sum.gbnf", tmp_path / "bad.json"
    schema.write_text(json.dumps(CITY))
    ebnf.write_text('root ::= number " + " number\nnumber ::= [0-9]{1,3}\n')
    bad.write_text('{"type": "array", "items": {"not": {}}}')
    answers = await asyncio.gather(
        run(*at, "--json-schema", str(schema), "A city as JSON:"),
        run(*at, "--regex", "(yes|no), because [a-z ]{3,30}\\.", "Is the sky blue?"),
        run(*at, "--grammar", str(ebnf), "A sum:"),
        run(*at, "--json-object", "--temperature", "0", "Anything as JSON:"),
        run(*at, "--json-schema", str(bad), "x"),
        run(*at, "--regex", "a(b", "x"),
    )
    *outputs, unenforceable, unreadable = answers
    assert [output.code for output in outputs] == [Exit.OK] * 4, [(output.err, output.lines[-1:]) for output in outputs]
    texts = ["".join(line["delta"]["text"] for line in output.lines if "delta" in line) for output in outputs]
    ends = [output.lines[-1]["completed"]["finish_reason"].removeprefix("FINISH_REASON_") for output in outputs]
    assert set(ends[:3]) <= {"EOS", "GRAMMAR_COMPLETE"}, (ends, texts)
    jsonschema.validate(json.loads(texts[0]), CITY)
    assert texts[1].startswith(("yes, because ", "no, because ")) and texts[1].endswith(".")
    assert [part.isdigit() for part in texts[2].split(" + ")] == [True, True]
    assert texts[3].startswith("{") and (ends[3] == "MAX_OUTPUT_TOKENS" or isinstance(json.loads(texts[3]), dict))
    for refused, field, says in (
        (unenforceable, "grammar.json_schema", "not at #/items cannot be enforced"),
        (unreadable, "grammar.regex", "position 4"),
    ):
        error = refused.lines[-1]["error"]
        assert refused.code == Exit.BAD_INPUT and error["status"] == "INVALID_ARGUMENT"
        assert [one["field"] for one in error["violations"]] == [field] and says in error["violations"][0]["description"]

"""What `tandem generate` makes of its options about grammars."""

from pathlib import Path

import pytest

from tandem.v1 import inference_pb2 as pb
from tandem_cli.exits import Exit, Failure
from tandem_cli.grammar_options import grammar_of


def test_each_option_becomes_its_rule(tmp_path: Path) -> None:
    file = tmp_path / "rule"
    file.write_text('root ::= "é"\n', encoding="utf-8")
    assert grammar_of(None, None, None, False) is None
    assert grammar_of(file, None, None, False) == pb.Grammar(json_schema='root ::= "é"\n')
    assert grammar_of(None, "", None, False) == pb.Grammar(regex="")
    assert grammar_of(None, None, file, False) == pb.Grammar(ebnf='root ::= "é"\n')
    assert grammar_of(None, None, None, True) == pb.Grammar(json_object=pb.JsonObject())


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    bad, missing = tmp_path / "bad", tmp_path / "missing"
    bad.write_bytes(b"ab\xff")
    for arguments, says in (
        ((bad, "a", None, False), "--json-schema and --regex cannot be used together"),
        ((None, None, bad, True), "--grammar and --json-object cannot be used together"),
        ((bad, None, None, False), f"--json-schema: {bad} is not UTF-8: byte 2 cannot be read"),
        ((None, None, missing, False), f"--grammar: {missing} cannot be read: No such file or directory"),
        ((None, None, tmp_path, False), f"--grammar: {tmp_path} cannot be read: Is a directory"),
    ):
        with pytest.raises(Failure) as failure:
            grammar_of(*arguments)
        assert failure.value.code is Exit.BAD_INPUT and str(failure.value) == says

"""Conformance tests A, B and C of the decode loop, on the sequence alone."""

from engine.sequence import Step
from lifecycle.finish import Ending, FinishReason
from lifecycle.states import State
from tests.unit.sequence_kit import Case, feed, run, text_of


def test_conformance_a_a_stop_inside_the_second_token() -> None:
    """selected(1), delta "A", decode(1), selected(2), stop_hit, completed(stop_sequence)."""
    case = Case(vocabulary=(b"AB", b"CD"), stops=("BCD",))
    sequence = case.start()
    events: list[object] = []

    step = sequence.choose(0, 0.0)
    events += [("selected", sequence.selected_tokens), ("delta", step.text)]
    assert step.ending is None and sequence.held_bytes == 1
    sequence.completed(1)
    events.append(("decode", sequence.cache_tokens - len(case.prompt)))
    step = sequence.choose(1, 0.0)
    events.append(("selected", sequence.selected_tokens))
    assert step.ending == Ending(FinishReason.STOP_SEQUENCE, matched_stop="BCD")
    events += [("stop_hit", step.text), ("completed", step.ending.reason)]

    assert events == [
        ("selected", 1),
        ("delta", b"A"),
        ("decode", 1),
        ("selected", 2),
        ("stop_hit", b""),
        ("completed", FinishReason.STOP_SEQUENCE),
    ]
    assert step.token_ids == ()


def test_conformance_b_a_cancel_while_the_third_token_is_decoded() -> None:
    sequence, steps = run(Case(vocabulary=(b"x", b"y")), [0, 1, 0])
    assert sequence.selected_tokens == 3
    assert sequence.next_input() == (0, 5)  # decode.started(3)
    cancel = Ending(FinishReason.CANCELLED)
    sequence.completed(1)  # decode.completed(3)
    last = sequence.choose(1, 1.0, cancel)
    assert last == Step(b"", (), cancel)
    assert sequence.selected_tokens == 3 and sequence.output_token_ids == (0, 1, 0)
    assert text_of([*steps, last]) == "xyx"
    assert cancel.state(sequence.usage().returned_tokens) is State.CANCELLED
    assert sequence.cache_tokens == 3 + 3


def test_conformance_b_the_cancel_may_also_be_seen_before_the_step_has_run() -> None:
    sequence, _ = run(Case(vocabulary=(b"x", b"y")), [0, 1, 0])
    step = sequence.end(Ending(FinishReason.CANCELLED), 1.0)
    assert (step.text, step.token_ids) == (b"", ())
    assert not sequence.waiting
    sequence.completed(1)
    assert sequence.usage().processed_tokens == 3 + 3


def test_conformance_c_characters_and_a_stop_over_byte_tokens() -> None:
    """Bytes e4bd a0 e5 a5bd 45 4e 44 with stop "END": deltas "你", "好", nothing else."""
    pieces = tuple(bytes.fromhex(piece) for piece in ("e4bd", "a0", "e5", "a5bd", "45", "4e", "44"))
    sequence = Case(vocabulary=pieces, stops=("END",)).start()
    steps = [feed(sequence, token) for token in range(len(pieces))]
    assert [step.text.decode() for step in steps if step.text] == ["你", "好"]
    assert [step.token_ids for step in steps] == [(), (0, 1), (), (2, 3), (), (), ()]
    assert steps[-1].ending == Ending(FinishReason.STOP_SEQUENCE, matched_stop="END")
    assert sequence.usage().returned_tokens == 4

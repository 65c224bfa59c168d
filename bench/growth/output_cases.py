"""What one more token costs after n tokens of the same output."""

import itertools
from collections.abc import Callable

from bench.growth.counting import Case
from decode_svc.replay_log import ReplayLog, Sent
from decode_svc.stream_log import StreamLog as SeatLog
from engine.sample_row import SampleRow
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceSpec, StopSpec
from engine.sequence_spec import Earlier
from lifecycle.record import AttemptKey
from router.stream_log import LogBounds
from router.stream_log import StreamLog as RouterLog
from text.detokeniser import Detokeniser, plain_table
from text.stop_matcher import StopMatcher, StopRules

TABLE = plain_table([bytes([value]) for value in range(256)])
#: Stops that every output nearly matches, so that text is held and let go all the time.
STOPS = StopRules((b"abcd" * 8, b"bcda" * 4 + b"x"))
VOCABULARY = 49_152
MOST = 20_000


def sequence(penalised: bool = False) -> Sequence:
    """An output with stop texts whose prompt is computed; with penalties it counts its tokens too."""
    sampling = SamplingParams(temperature=1.0, repetition_penalty=1.1) if penalised else SamplingParams(temperature=0.0)
    spec = SequenceSpec(AttemptKey("r", 1), 0, (1, 2, 3), sampling, StopSpec(STOPS), MOST, 2 * MOST)
    made = Sequence(spec, lambda policy: Detokeniser(TABLE, policy))
    made.completed(3)
    return made


def _token(penalised: bool, tokens: int) -> Callable[[], object]:
    output, ids = sequence(penalised), itertools.cycle(b"abc")

    def one() -> object:
        step = output.choose(next(ids), 0.0)
        output.next_input()
        output.completed(1)
        return step.text, output.sample_row()

    for _ in range(tokens):
        one()
    return one


def _detokenised(tokens: int) -> Callable[[], object]:
    stream, matcher, ids = Detokeniser(TABLE), StopMatcher(STOPS), itertools.cycle(b"abc")

    def one() -> object:
        return matcher.push(stream.push(next(ids)))

    for _ in range(tokens):
        one()
    return one


def _seat_log(tokens: int) -> Callable[[], object]:
    log: SeatLog[str] = SeatLog(1, 65_536)
    kept = ReplayLog(64 * 1024, Earlier())

    def one() -> object:
        log.add(b"text", (7,), (7,), 0.0)
        published = log.publish()
        assert published is not None
        kept.add(Sent(published.sequence_no, b"x" * 64, 1, 1, 4), published.selected_ids)
        return published

    for _ in range(tokens):
        one()
    return one


def _router_log(tokens: int) -> Callable[[], object]:
    log = RouterLog(LogBounds())
    reader = log.open(0)

    def one() -> object:
        log.put(b"x" * 64, 4)
        event = log.peek(reader)
        log.sent(reader)
        return event, log.full

    for _ in range(tokens):
        one()
    return one


def _penalties(tokens: int) -> Callable[[], object]:
    """The sampler's edit of one row of logits; half of the tokens are ids that were not there before."""
    import numpy as np

    from engine.sampler_edits import edit

    output = sequence(penalised=True)
    history = output.sample_row().history
    assert history is not None
    for number in range(tokens):
        history.add(number // 2 % VOCABULARY)
    row = SampleRow(output.spec.sampling, 0, tokens, history)
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    return lambda: edit(logits, row, 0)


OUTPUT_CASES = (
    Case("sequence: choose, text, stops", "tokens out", lambda n: _token(False, n)),
    Case("sequence with penalties", "tokens out", lambda n: _token(True, n)),
    Case("detokeniser and stop matcher", "tokens out", _detokenised),
    Case("decode: stream log and replay", "tokens out", _seat_log),
    Case("router: stream log, one reader", "tokens out", _router_log),
    Case("sampler: penalties of one row", "tokens out", _penalties),
)
OUTPUT_SIZES = (1, 100, 1000, 8000)

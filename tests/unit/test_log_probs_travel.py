"""From the step that chose a token to the router that goes on elsewhere: each log-probability stays with its token (C8)."""

import random
from dataclasses import dataclass, field

import pytest

from decode_svc.replay_log import ReplayLog, Sent
from decode_svc.stream_log import Published, StreamLog
from engine.log_probs import TokenLogProb
from engine.sequence import Earlier
from router.pool_messages import Output
from router.progress import Progress

TOP = 1


def told(token: int) -> TokenLogProb:
    """What token number `token` of every output is told with."""
    return TokenLogProb(-float(token), (token,), (-1.0,))


def written(log_probs: tuple[TokenLogProb, ...]) -> tuple[bytes, ...]:
    return tuple(str(int(-one.value)).encode() for one in log_probs)


def read(log_probs: tuple[bytes, ...]) -> tuple[TokenLogProb, ...]:
    return tuple(told(int(data)) for data in log_probs)


@dataclass
class Story:
    """An output whose tokens are numbers: chosen one by one, shown later and in the order of choosing."""

    rng: random.Random
    final_only: bool
    chosen: int = 0
    shown: int = 0
    returned: list[int] = field(default_factory=list)
    progress: Progress = field(default_factory=lambda: Progress(1, 0.0))

    def seat(self) -> "tuple[StreamLog[str], ReplayLog]":
        """At another member, from what the router knows."""
        progress = self.progress
        earlier = Earlier(
            tuple(progress.output_token_ids), progress.text_bytes, progress.returned_tokens, read(progress.held_log_probs)
        )
        unreturned = earlier.token_ids[earlier.returned_tokens :]
        assert earlier.held_log_probs == tuple(told(token) for token in unreturned)
        self.chosen, self.shown = len(earlier.token_ids), earlier.returned_tokens
        log: StreamLog[str] = StreamLog(1, 10_000, self.final_only, TOP, earlier.held_log_probs)
        return log, ReplayLog(1000, earlier, whole=True)

    def step(self, log: "StreamLog[str]") -> None:
        """One token more; some text, or none, becomes safe."""
        self.chosen += 1
        upto = self.rng.randint(self.shown, self.chosen) if self.rng.random() < 0.6 else self.shown
        shown = tuple(range(self.shown, upto))
        text = b"x" * len(shown) if self.rng.random() < 0.8 else b""
        log.add(text, shown, (self.chosen - 1,), 0.0, (told(self.chosen - 1),))
        self.shown = upto

    def tell(self, published: Published, replay: ReplayLog) -> None:
        """The router reads one output."""
        self.returned += published.token_ids
        assert list(published.log_probs) == [told(token) for token in published.token_ids]
        counts = (len(published.selected_ids), len(published.token_ids), published.text_bytes)
        replay.add(Sent(published.sequence_no, b"y" * 20, *counts, published.held_log_probs, published), published.selected_ids)
        self.progress.output(
            Output(
                b"", 0, published.selected_ids, len(published.token_ids), published.text_bytes, written(published.held_log_probs)
            ),
            0.0,
        )
        progress = self.progress
        unreturned = progress.output_token_ids[progress.returned_tokens :]
        assert read(progress.held_log_probs) == tuple(told(token) for token in unreturned)


@pytest.mark.parametrize("final_only", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_c8_every_log_probability_stays_with_its_token_over_members_moves_and_routers(seed: int, final_only: bool) -> None:
    output = Story(random.Random(seed), final_only)
    for _ in range(output.rng.randint(1, 4)):
        log, replay = output.seat()
        for _ in range(output.rng.randint(0, 40)):
            output.step(log)
            while output.rng.random() < 0.5 and (published := log.publish()) is not None:
                output.tell(published, replay)
        while (published := log.publish()) is not None:
            output.tell(published, replay)
        again = replay.replay(1 << 30, log.next_sequence_no)
        assert again.told[0].held_log_probs == read(output.progress.held_log_probs)
        if output.rng.random() < 0.5:  # it moves: what is untold is told with the answer, and nothing is chosen again
            untold = log.untold_ids
            output.progress.paused(untold, written(log.untold_log_probs))
    assert output.returned == list(range(len(output.returned)))
    log, replay = output.seat()
    while output.shown < output.chosen:
        output.step(log)
    log.end("the end")
    last = log.publish()
    if final_only:
        ids, log_probs = log.whole_tokens()
        assert last is None and list(ids) == list(range(output.shown)) and list(log_probs) == [told(token) for token in ids]
    elif last is not None:
        output.tell(last, replay)
        assert output.returned == list(range(output.shown))


def test_what_was_dropped_of_a_whole_output_is_still_told() -> None:
    output = Story(random.Random(5), False)
    log, replay = output.seat()
    for _ in range(200):
        output.step(log)
        if (published := log.publish()) is not None:
            output.tell(published, replay)
    again = replay.replay(1, log.next_sequence_no)
    assert again.next_sequence_no > 1, "nothing was dropped"
    ids = [token for part in again.returned for token in part.token_ids]
    assert (
        ids == list(range(again.told[0].returned_tokens))
        and len("".join(part.text for part in again.returned)) == again.told[0].text_bytes
    )
    later = replay.replay(again.next_sequence_no + 2, log.next_sequence_no)
    assert [t for part in later.returned for t in part.token_ids] == list(range(later.told[0].returned_tokens))

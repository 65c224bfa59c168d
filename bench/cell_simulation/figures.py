"""What a run came to: who was served well, how fast first tokens and tokens were."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.cell_simulation.settings import Targets
from tandem_cli.load.measured import quantile

#: Requests of this first share of the run fill an empty cell and are not counted.
FILLING_SHARE = 0.2
#: Inter-token times are counted in classes of so many seconds; the last class takes all that is longer.
CLASS_S = 0.001
CLASSES = 20_000


@dataclass(eq=False, slots=True)
class Request:
    """One request and what became of it. Times in seconds of the run, -1 before they are known. `arrived_at`: the first time that
    its client came, from which time to first token counts; `came_at`: the last time, if it was refused before. `attempts`: after
    it was let in."""

    request_id: str
    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    idle_prompt_s: float
    first_at: float = -1.0
    last_at: float = -1.0
    tokens: int = 0
    late: int = 0
    tries: int = 1
    came_at: float = -1.0
    attempts: int = 1
    preemptions: int = 0
    failure: str = ""

    @property
    def done(self) -> bool:
        """Whether all of its answer was made."""
        return self.tokens >= self.output_tokens

    def met(self, targets: Targets) -> tuple[bool, bool]:
        """Whether its first token and its other tokens came in time."""
        if not self.done:
            return False, False
        most_s = targets.first_token_s + targets.idle_factor * self.idle_prompt_s
        return self.first_at - self.arrived_at <= most_s, self.late <= targets.late_share * max(1, self.tokens - 1)


@dataclass(slots=True)
class Gaps:
    """Inter-token times of all requests, by class."""

    counts: list[int] = field(default_factory=lambda: [0] * (CLASSES + 1))

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[min(CLASSES, int(seconds / CLASS_S))] += 1

    def quantile(self, share: float) -> float:
        """The upper end of the class in which `share` of them end, in seconds."""
        wanted, seen = share * sum(self.counts), 0
        for place, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return (place + 1) * CLASS_S
        return 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """One run. Rates are requests a second over the counted part; shares from 0 to 1; times in seconds."""

    offered_per_s: float
    goodput_per_s: float
    attainment: float
    first_token_attainment: float
    inter_token_attainment: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    failed: int
    unfinished: int
    retried: int
    preemptions: int
    prefill_busy: float
    decode_busy: float
    requests: int


def result(requests: Sequence[Request], gaps: Gaps, targets: Targets, prefill_busy: float, decode_busy: float) -> Result:
    """The figures of the requests that came after the cell was filled."""
    span = requests[-1].arrived_at
    counted = [one for one in requests if one.arrived_at >= FILLING_SHARE * span]
    seconds = max(1e-9, span * (1 - FILLING_SHARE))
    met = [one.met(targets) for one in counted]
    good = sum(first and others for first, others in met)
    ttft = [one.first_at - one.arrived_at for one in counted if one.first_at >= 0]
    return Result(
        offered_per_s=len(counted) / seconds,
        goodput_per_s=good / seconds,
        attainment=good / len(counted),
        first_token_attainment=sum(first for first, _ in met) / len(counted),
        inter_token_attainment=sum(others for _, others in met) / len(counted),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        gap_p50_s=gaps.quantile(0.5),
        gap_p99_s=gaps.quantile(0.99),
        failed=sum(bool(one.failure) for one in counted),
        unfinished=sum(not one.done and not one.failure for one in counted),
        retried=sum(one.attempts > 1 for one in counted),
        preemptions=sum(one.preemptions for one in counted),
        prefill_busy=prefill_busy,
        decode_busy=decode_busy,
        requests=len(counted),
    )


COLUMNS = (
    *("cell", "offered req/s", "goodput req/s", "all targets met", "first token in time", "tokens in time"),
    *("TTFT p50 s", "TTFT p99 s", "inter-token p50 ms", "inter-token p99 ms", "failed", "retried", "preempted"),
    *("prefill busy", "decode busy"),
)


def row(name: str, one: Result) -> list[str]:
    """One line of the table."""
    return [
        name,
        f"{one.offered_per_s:.1f}",
        f"{one.goodput_per_s:.1f}",
        f"{one.attainment:.1%}",
        f"{one.first_token_attainment:.1%}",
        f"{one.inter_token_attainment:.1%}",
        f"{one.ttft_p50_s:.2f}",
        f"{one.ttft_p99_s:.2f}",
        f"{one.gap_p50_s * 1e3:.0f}",
        f"{one.gap_p99_s * 1e3:.0f}",
        str(one.failed + one.unfinished),
        str(one.retried),
        str(one.preemptions),
        f"{one.prefill_busy:.0%}" if one.prefill_busy else "-",
        f"{one.decode_busy:.0%}",
    ]

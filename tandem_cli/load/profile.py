"""Where the time goes: parts of a decode step and phases of a request, out of the metrics that members and routers export."""

import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tandem_cli.load.tables import Tabled
from telemetry.decode_metrics import STEP_PARTS
from telemetry.router_metrics import PHASES

STEP = "tandem_decode_step_seconds"
STEP_PART = "tandem_decode_step_part_seconds"
STEP_SEQUENCES = "tandem_decode_step_sequences"
PREFILL_STEP = "tandem_prefill_step_seconds"
PREFILL_TOKENS = "tandem_prefill_step_tokens"
LENT_STEPS = ("tandem_decode_lent_steps", "tandem_prefill_lent_steps")
MODEL_PARTS = {"decode": "tandem_decode_model_part_seconds", "prefill": "tandem_prefill_model_part_seconds"}
PHASE = "tandem_router_phase_seconds"
END_TO_END = "tandem_router_end_to_end_seconds"
FIRST_TOKEN = "tandem_router_first_token_seconds"
#: Phases that lie inside other ones; they are no part of the sum.
INSIDE = {"handover": "begins during prefill", "stop_hold": "during decode", "send": "during decode"}
PAGE_TIMEOUT_S = 10.0


class NoMetrics(Exception):
    """A process does not show its metrics. The message names its address."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sum and count of histograms, by name and the value of their only label ("" without one). A counter is a sum of count 0."""

    of: Mapping[tuple[str, str], tuple[float, float]]

    def minus(self, before: "Sums") -> "Sums":
        """What came since."""
        zero = (0.0, 0.0)
        return Sums(
            {key: (got[0] - before.of.get(key, zero)[0], got[1] - before.of.get(key, zero)[1]) for key, got in self.of.items()}
        )

    def sum(self, name: str, label: str = "") -> float:
        """All of it together; 0 for what nobody exports."""
        return self.of.get((name, label), (0.0, 0.0))[0]

    def count(self, name: str, label: str = "") -> float:
        """How often."""
        return self.of.get((name, label), (0.0, 0.0))[1]

    def labels(self, name: str) -> list[str]:
        """Values of its label, in the order of the page."""
        return [label for known, label in self.of if known == name]

    def mean(self, name: str, label: str = "") -> float:
        """0 for none."""
        return self.sum(name, label) / (self.count(name, label) or 1.0)


def sums_of(pages: Iterable[str]) -> Sums:
    """Add up the histograms and counters of several /metrics pages."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples if family.type in ("histogram", "counter") else ():
                key = (family.name, next((value for name, value in sample.labels.items() if name != "le"), ""))
                total, count = found.get(key, (0.0, 0.0))
                if sample.name.endswith("_sum") or family.type == "counter":
                    found[key] = (total + sample.value, count)
                elif sample.name.endswith("_count"):
                    found[key] = (total, count + sample.value)
    return Sums(found)


def read_page(address: str) -> str:
    """What a process exports at http://host:port/metrics, `address` being host:port. Raises NoMetrics."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=PAGE_TIMEOUT_S) as page:
            return str(page.read().decode())
    except (OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NoMetrics(f"no metrics at {address}: {cause}") from error


def read_sums(addresses: Iterable[str]) -> Sums:
    """Of several processes, now. Raises NoMetrics."""
    return sums_of(read_page(address) for address in addresses)


def step_table(sums: Sums, seconds: float) -> Tabled:
    """A decode step by its parts, and what lay between steps. seconds: how long was measured."""
    steps, whole = sums.count(STEP), sums.sum(STEP)
    rows = [[part, f"{sums.mean(STEP_PART, part) * 1e3:.3f}", _share(sums.sum(STEP_PART, part), whole)] for part in STEP_PARTS]
    rows.append(["**the step**", f"{sums.mean(STEP) * 1e3:.3f}", _share(whole, whole)])
    prefill = sums.mean(PREFILL_STEP) * 1e3
    words = (
        f"{steps:.0f} decode steps of {sums.mean(STEP_SEQUENCES):.1f} sequences in {seconds:.1f} s: "
        f"{_share(whole, seconds)} of the time was in steps."
    )
    if sums.count(PREFILL_STEP):
        words += (
            f" {sums.count(PREFILL_STEP):.0f} prefill steps of {sums.mean(PREFILL_TOKENS):.0f} tokens, {prefill:.1f} ms each: "
            f"{_share(sums.sum(PREFILL_STEP), seconds)} of the time."
        )
    lent = [
        f"{_share(sums.sum(name), sums.count(of))} of {kind} steps"
        for kind, name, of in (("decode", LENT_STEPS[0], STEP), ("prefill", LENT_STEPS[1], PREFILL_STEP))
        if sums.sum(name)
    ]
    if lent:
        words += f" Threads of a member with nothing to compute were used by {' and '.join(lent)}."
    return Tabled(("part of a decode step", "mean ms", "share of the step"), rows, words)


def model_table(sums: Sums) -> Tabled | None:
    """The model's part of decode and prefill steps, by the model's own parts; None where no backend counts them."""
    calls = {
        "decode": (sums.count(STEP), sums.sum(STEP_PART, "model")),
        "prefill": (sums.count(PREFILL_STEP), sums.sum(PREFILL_STEP)),
    }
    parts = list(dict.fromkeys(label for name in MODEL_PARTS.values() for label in sums.labels(name)))
    if not parts:
        return None
    rows = []
    for part in parts:
        cells = [_each_and_share(sums.sum(name, part), *calls[kind]) for kind, name in MODEL_PARTS.items()]
        rows.append([part, *(cell for pair in cells for cell in pair)])
    told = {kind: sum(sums.sum(name, part) for part in parts) for kind, name in MODEL_PARTS.items()}
    rest = {kind: whole - told[kind] for kind, (_, whole) in calls.items()}
    for word, of in (("everything else", rest), ("**all of it**", {kind: whole for kind, (_, whole) in calls.items()})):
        rows.append([word, *(cell for kind in calls for cell in _each_and_share(of[kind], *calls[kind]))])
    columns = ("model by part", "decode: mean ms a step", "share of the model", "prefill: mean ms a step", "share of the step")
    return Tabled(columns, rows)


def _each_and_share(seconds: float, count: float, whole: float) -> tuple[str, str]:
    return (f"{seconds / count * 1e3:.3f}" if count else "-", _share(seconds, whole))


def request_table(sums: Sums) -> Tabled:
    """A request by its phases, as means over all requests that ended."""
    whole = sums.sum(END_TO_END)
    rows, told = [], 0.0
    for phase in PHASES:
        total = sums.sum(PHASE, phase)
        inside = INSIDE.get(phase, "")
        told += 0.0 if inside else total
        rows.append([phase, f"{sums.mean(PHASE, phase) * 1e3:.2f}", _share(total, whole), inside])
    count = sums.count(END_TO_END) or 1.0
    rows.append(["everything else", f"{(whole - told) / count * 1e3:.2f}", _share(whole - told, whole), ""])
    rows.append(["**arrival to end**", f"{sums.mean(END_TO_END) * 1e3:.2f}", _share(whole, whole), ""])
    rows.append(["arrival to first token", f"{sums.mean(FIRST_TOKEN) * 1e3:.2f}", _share(sums.sum(FIRST_TOKEN), whole), ""])
    return Tabled(("phase of a request", "mean ms", "share", "counted"), rows)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def profile_tables(sums: Sums, seconds: float) -> list[Tabled]:
    """Everything that the metrics of a run tell. seconds: how long was measured."""
    found = (step_table(sums, seconds), model_table(sums), request_table(sums))
    return [one for one in found if one is not None]

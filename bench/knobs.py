"""What `bench.tuning` turns, and the table of what came of it. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.measured import Measured
from tandem_cli.cell import CellOptions, parse_setting

KV_TOKENS = 16_384
COLUMNS = (
    *(
        "setting",
        "TTFT p50 ms",
        "ratio",
        "inter-token p50 ms",
        "ratio",
        "inter-token p99 ms",
        "ratio",
        "output tokens/s",
        "ratio",
    ),
    *("not served", "disturbed runs"),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A cell with some settings changed, each as ROLE.SETTING=VALUE of `tandem up --set`."""

    settings: tuple[str, ...] = ()
    lend_cores: bool = True

    def __str__(self) -> str:
        return ", ".join((*self.settings, *(() if self.lend_cores else ("--no-lend-cores",)))) or "default"

    def options(self, base: CellOptions) -> CellOptions:
        """The cell to start. Raises BadOption."""
        extra = tuple(parse_setting(one) for one in self.settings)
        return replace(base, lend_cores=self.lend_cores, extra=(*base.extra, *extra))


@dataclass(frozen=True, slots=True)
class Knob:
    """Something that can be turned, and how it is turned here; measured in turns with the default."""

    name: str
    variants: tuple[Variant, ...]


def one_role(role: str, name: str, *values: object, beside: Sequence[str] = ()) -> Knob:
    """A setting of one role at these values, with others beside it that do not change."""
    return Knob(f"{role}.{name}", tuple(Variant((*beside, f"{role}.{name}={value}")) for value in values))


def page_lengths(*lengths: int) -> Knob:
    """Pages of other lengths, of as much KV: the same for both pools."""
    variants = [
        Variant(
            tuple(
                f"{role}.{setting}={value}"
                for role in ("prefill", "decode")
                for setting, value in (("page_tokens", length), ("total_pages", -(-KV_TOKENS // length) + 1))
            )
        )
        for length in lengths
    ]
    return Knob("page_tokens", tuple(variants))


DEFAULT = Variant()
KNOBS = (
    page_lengths(8, 64),
    one_role("prefill", "max_step_tokens", 64, 128, 512),
    one_role("decode", "step_sequences", 2, 4),
    one_role("decode", "max_step_tokens", 64, 128),
    one_role("decode", "max_sequences", 2, 4),
    one_role("router", "local_tokens", 0, 512),
    one_role("router", "total_tokens", 512, 1024),
    one_role("router", "total_pages", 64, 128),
    one_role("router", "queue_requests", 2, beside=("decode.max_sequences=4",)),
    Knob("lend_cores", (Variant(lend_cores=False),)),
    one_role("decode", "speculation", "prompt_lookup"),
)


def chosen(names: str) -> tuple[Knob, ...]:
    """Knobs by name, comma-separated; empty: all. Raises ValueError with the names that there are."""
    if not names:
        return KNOBS
    known = {knob.name: knob for knob in KNOBS}
    wanted = [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"there is no knob {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in wanted)


def ratio(figure: Callable[[Measured], float], runs: Sequence[Measured], default: Sequence[Measured]) -> float | None:
    """Of a variant's runs to the default's of the same rounds: the median; of undisturbed pairs while there are any.

    None where the default's figure is 0.
    """
    pairs = [(one, other) for one, other in zip(runs, default, strict=True) if figure(other)]
    quiet = [pair for pair in pairs if not any(one.disturbance.disturbed for one in pair)]
    ratios = [figure(one) / figure(other) for one, other in (quiet or pairs)]
    return statistics.median(ratios) if ratios else None


FIGURES: tuple[tuple[Callable[[Measured], float], float, str], ...] = (
    (lambda run: run.first_token_s(0.5), 1e3, ".0f"),
    (lambda run: run.gap_s(0.5), 1e3, ".1f"),
    (lambda run: run.gap_s(0.99), 1e3, ".1f"),
    (lambda run: run.output_tokens_per_s, 1.0, ".1f"),
)


def row(variant: Variant, runs: Sequence[Measured], default: Sequence[Measured]) -> list[str]:
    """Medians over the rounds, and beside each its ratio to the default. `default` is `runs` in the default's own row."""
    cells = [str(variant)]
    for figure, scale, form in FIGURES:
        compared = None if runs is default else ratio(figure, runs, default)
        cells += [
            format(statistics.median(figure(run) for run in runs) * scale, form),
            "-" if compared is None else f"**{compared:.2f}**",
        ]
    asked = sum(len(run.requests) for run in runs)
    return [
        *cells,
        f"{sum(len(run.failures()) for run in runs)} of {asked}",
        f"{sum(run.disturbance.disturbed for run in runs)} of {len(runs)}",
    ]

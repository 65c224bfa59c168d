"""The knobs of bench.tuning, and the rows of its table."""

import pytest

from bench.disturbance import Disturbance
from bench.knobs import COLUMNS, DEFAULT, KNOBS, Variant, chosen, page_lengths, row
from bench.measured import Measured
from decode_svc.config import DecodeSettings
from prefill_svc.config import PrefillSettings
from router.config import RouterSettings
from rpc.settings import load_settings
from tandem_cli.cell import CellOptions
from tandem_cli.load.measured import Seen

QUIET, BUSY = Disturbance(0.0, 0.0), Disturbance(0.9, 0.0)


def measured(first_s: float, gap_s: float, seconds: float = 2.0, disturbance: Disturbance = QUIET, refused: int = 0) -> Measured:
    served = Seen(0.0, 3)
    served.arrivals = [(first_s + number * gap_s, 1) for number in range(3)]
    served.close(seconds)
    return Measured(seconds, (served, *(Seen(0.0, 3, failure="full") for _ in range(refused))), disturbance)


def cells(runs: list[Measured], default: list[Measured]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, cell in zip(COLUMNS, row(Variant(("decode.max_sequences=2",)), runs, default), strict=True):
        found.setdefault(name, []).append(cell)
    return found


def test_a_row_has_medians_and_ratios_of_the_same_round() -> None:
    default = [measured(0.1, 0.01), measured(0.2, 0.01), measured(0.4, 0.01)]
    row_of = cells([measured(0.2, 0.02, 4.0, refused=1), measured(0.4, 0.02, 4.0), measured(0.6, 0.02, 4.0)], default)
    assert row_of["setting"] == ["decode.max_sequences=2"]
    assert row_of["TTFT p50 ms"] == ["400"] and row_of["inter-token p50 ms"] == ["20.0"]
    assert row_of["ratio"] == ["**2.00**", "**2.00**", "**2.00**", "**0.50**"]
    assert row_of["not served"] == ["1 of 4"] and row_of["disturbed runs"] == ["0 of 3"]


def test_disturbed_rounds_are_left_out_while_there_are_others() -> None:
    default = [measured(0.1, 0.01), measured(0.1, 0.01, disturbance=BUSY)]
    row_of = cells([measured(0.2, 0.01), measured(0.9, 0.01)], default)
    assert row_of["ratio"][0] == "**2.00**"
    row_of = cells([measured(0.2, 0.01, disturbance=BUSY), measured(0.9, 0.01)], default)
    assert row_of["ratio"][0] == "**5.50**" and row_of["disturbed runs"] == ["1 of 2"]


def test_the_default_has_no_ratios_and_nothing_served_has_no_figure() -> None:
    default = [measured(0.1, 0.01)]
    assert row(DEFAULT, default, default)[:3] == ["default", "100", "-"]
    none = [Measured(1.0, (Seen(0.0, 3, failure="full"),), QUIET)]
    assert row(DEFAULT, default, none)[2] == "-"


def test_every_knob_is_a_setting_that_a_cell_takes() -> None:
    base = CellOptions(model="m", extra=(("decode", "--draft-tokens=4"),))
    for knob in KNOBS:
        assert knob.variants
        for variant in knob.variants:
            options = variant.options(base)
            assert options != base
            assert options.extra[: len(base.extra)] == base.extra
    assert Variant(lend_cores=False).options(base).lend_cores is False
    (short,) = page_lengths(5).variants
    flags = ("--page-tokens=5", "--total-pages=3278")
    assert short.options(base).extra[1:] == tuple((role, flag) for role in ("prefill", "decode") for flag in flags)


@pytest.mark.slow
def test_processes_take_the_settings_of_every_knob() -> None:
    """Raises SettingsError where one is not known or out of its limits."""
    needed = ("--decode=a:1", "--prefill=b:1", "--redis-url=unix:///store")
    for options in (variant.options(CellOptions(model="m")) for knob in KNOBS for variant in knob.variants):
        prefill = load_settings(PrefillSettings, options.flags_for("prefill"), {})
        decode = load_settings(DecodeSettings, options.flags_for("decode"), {})
        assert prefill.page_tokens == decode.page_tokens
        load_settings(RouterSettings, [*needed, *options.flags_for("router")], {})


def test_knobs_are_chosen_by_name() -> None:
    assert chosen("") == KNOBS
    assert [knob.name for knob in chosen("lend_cores, router.total_pages")] == ["lend_cores", "router.total_pages"]
    with pytest.raises(ValueError, match="no knob wheel; there are page_tokens, prefill"):
        chosen("wheel")

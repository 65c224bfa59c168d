"""The two ends of bench.handover: both ways of writing write the whole prompt."""

import pytest

from bench.disturbance import Disturbance
from bench.handover import bandwidth_row, share_row
from bench.handover_ends import Setup, calls, two_ends
from bench.measured import Measured
from bench.turns import Bursts
from engine.layout import GroupKind, GroupLayout, Layout
from tandem_cli.load.measured import Seen

SETUP = Setup(Layout("tiny", (GroupLayout(GroupKind.FULL, 6, 2, 16, 16, "bfloat16"),)), 300, 90, "tcp")


@pytest.mark.slow
def test_a_hand_over_and_a_bare_write_bring_the_same_bytes() -> None:
    with two_ends(SETUP) as (writer, reader):
        ways = calls(writer, reader)
        assert reader.do("content") == writer.do("content")
        for way in ways:
            writer.do("fill")
            assert reader.do("content") != writer.do("content")
            assert way() > 0
            assert reader.do("content") == writer.do("content")
        parts, ranges, size_bytes = writer.do("parts", reader.do("offer", writer.do("name")))
        assert (parts, ranges) == (2, 2) and size_bytes == 6 * SETUP.layout.groups[0].page_bytes + 4 * 300
        with pytest.raises(RuntimeError, match="AttributeError"):
            writer.do("no_such_method")


def _bursts(*medians_s: float) -> Bursts:
    made = Bursts()
    for median_s in medians_s:
        made.add([median_s], False)
    return made


def test_the_rows_of_the_hand_over() -> None:
    row = bandwidth_row(_bursts(0.005, 0.010), _bursts(0.004, 0.008), 10_000_000)
    assert row[1:] == ["1333 MB/s", "1667 MB/s", "0.80", "≥ 0.7", "≥ 0.9", "must", "0 of 4"]
    seen = Seen(0.0, 1, arrivals=[(0.5, 1)], phases={"handover_exposed_s": 0.010})
    seen.close(0.5)
    row = share_row(Measured(1.0, (seen,), Disturbance(0.2, 0.0)), 512)
    assert row[1:] == ["10.0 ms not hidden", "500 ms TTFT p50", "2.0%", "≤ 5%", "≤ 3%", "aim", "yes: others 20.0%, steal 0.0%"]

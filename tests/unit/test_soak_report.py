"""What a soak is found guilty of, from a story made up here."""

from collections import Counter

import pytest

from tests.soak.measuring import keys_by_kind
from tests.soak.report import bytes_of_a_record, faults_of, report, verdict_of, warm_s
from tests.soak.story import Asked, Story
from tests.soak.verdict import Sample

MINUTE_S = 60.0
MIB = 1024 * 1024


def story(record_bytes: float = 4000.0, line_bytes: int = 1000, surplus: int = 0, leak: float = 0.0) -> Story:
    """Half an hour with a rest each minute and ten requests between two of them. leak: MiB of decode-0 a minute."""
    made = Story(Counter(served=290, cancelled=10), Counter(SIGKILL=3), seconds=30 * MINUTE_S, requests=300, waves=30)
    made.eldest = ("decode-0.1", "store.1")
    for minute in range(31):
        at_s, records = MINUTE_S * minute, 10.0 * minute + surplus
        store = {"records": records, "other_keys": 3.0, "used_mib": 1.0 + records * record_bytes / MIB}
        made.samples.setdefault("store.1", []).append(Sample(at_s, 7, store))
        made.samples.setdefault("decode-0.1", []).append(Sample(at_s, 7, {"rss": 900.0 + leak * minute, "threads": 18.0}))
        made.asked.append(Asked(at_s, 10 * minute, 10 * minute * line_bytes))
    return made


def faults(told: Story) -> list[str]:
    return faults_of(told, verdict_of(told))


def test_a_clean_soak_is_told_with_its_figures() -> None:
    clean = story()
    assert faults(clean) == []
    assert warm_s(clean) == 600.0 and warm_s(Story(seconds=90.0)) == 30.0
    assert bytes_of_a_record(clean) == pytest.approx(4000.0)
    text = report(clean, verdict_of(clean))
    assert "30 waves in 30.0 minutes: 300 requests" in text
    assert "Ends: 290 served, 10 cancelled." in text
    assert "Bytes of logs for a request: 1000. Bytes of a record: 4000." in text
    assert "| decode-0.1 | rss | MiB | 21 | 20 | 900.0 | 900.0 | +0.0 | +0.0 | 64.0 |" in text
    assert "| decode-0.1 | threads | threads | 21 | 20 | 18.0 | 18.0 | +0.0 in all | +0.0 in all | 4.0 in all |" in text
    assert text.endswith("Clean: nothing grew, every request ended rightly, everything came back.")


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (story(leak=2.0), "decode-0.1: rss grew by 40.0 MiB"),
        (story(record_bytes=9000.0), "a record takes 9000 bytes of the store, at most 8192 are allowed"),
        (story(line_bytes=100_000), "logs took 100000 bytes for each request"),
        (story(surplus=250), "the store has 250 records at 0 s, of 0 requests"),
    ],
)
def test_what_is_wrong_is_said(told: Story, sentence: str) -> None:
    assert sentence in faults(told)[0]
    assert sentence in report(told, verdict_of(told))


def test_what_went_wrong_in_a_wave_counts_and_so_does_a_soak_without_an_answer() -> None:
    told = story()
    told.wrong.append("wave 3: r-1 has two ends")
    assert faults(told) == ["wave 3: r-1 has two ends"]
    told = story()
    told.outcomes.clear()
    assert faults(told) == ["no request was served"]


def test_a_young_store_tells_no_size_of_a_record() -> None:
    told = story()
    told.samples["store.1"] = told.samples["store.1"][:5]
    told.asked = told.asked[:5]
    assert bytes_of_a_record(told) is None


def test_keys_are_counted_by_kind() -> None:
    keys = ["{default}:request:a", "{default}:request:b:c", "{default}:leases", "{default}:owned:r", "{c}:hints:m"]
    assert keys_by_kind(keys) == {"request": 2, "leases": 1, "owned": 1, "hints": 1}

"""A short soak: every part of a long one, faults too; at rest everything is back. `make soak` judges growth over half an hour."""

import io
import json
import tempfile
from pathlib import Path

import pytest

from models import Tokenizer
from tests.soak.report import faults_of, report, verdict_of
from tests.soak.running import Length, Soak, soak_cell

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1200)]

#: Wave 0 is calm, and there are two at least.
SECONDS = 45.0


async def test_a_short_soak_is_clean(tokenizer: Tokenizer) -> None:
    journal, told = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder, soak_cell(Path(folder)) as cell:
        soak = Soak(cell, tokenizer, "short", told, journal)
        story = await soak.run(Length(SECONDS, 8))
    verdict = verdict_of(story)
    text = report(story, verdict)
    assert not faults_of(story, verdict), f"{told.getvalue()}\n{text}"
    assert story.faults.total() and story.outcomes["served"]
    assert {"router-0.1", "prefill-0.1", "decode-0.1"} <= set(story.eldest)
    lines = [json.loads(line) for line in journal.getvalue().splitlines()]
    rests = [line for line in lines if line["process"] == "decode-0.1" and "working" not in line]
    assert len(rests) == len(story.samples["decode-0.1"]) == story.waves + 1
    assert all(line["objects"] > 10_000 and line["rss"] >= line["uss"] > 0 for line in rests)

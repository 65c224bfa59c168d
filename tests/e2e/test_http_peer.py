"""A load generator that others wrote, against a real cell's HTTP door."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from tandem_cli.cell import Cell
from tests.e2e.cells import at_rest

#: The command of guidellm 0.8: on the path, or where the variable says.
GUIDELLM = os.environ.get("GUIDELLM") or shutil.which("guidellm")
REQUESTS, TOKENS = 6, 6

pytestmark = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(GUIDELLM is None, reason="needs guidellm 0.8 (pip install guidellm, in an environment of its own)"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_guidellm_finishes_every_request(exact_cell: Cell, tmp_path: Path, path: str) -> None:
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    lines = [{"prompt": f"Say number {number} in words.", "output_tokens_count": TOKENS} for number in range(REQUESTS)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = await asyncio.create_subprocess_exec(
        *(str(GUIDELLM), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target=http://{exact_cell.http_address},request_format={path}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": ""},
    )
    said, _ = await asyncio.wait_for(process.communicate(), 280)
    assert process.returncode == 0, said.decode()[-2000:]
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["output_token_count"]["successful"]["mean"] == TOKENS
    await at_rest(exact_cell)

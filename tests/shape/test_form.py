"""The form of the code: sizes, generated code, layers, pictures, no torch in the router."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from lifecycle.picture import mermaid

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("lifecycle", "telemetry", "rpc", "text", "models", "engine", "kv_transfer", "member"),
    *("prefill_svc", "decode_svc", "router", "tandem_cli", "bench", "tools"),
)
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
FORBIDDEN_NAMES = {"common", "core", "utils", "util", "helpers", "misc"}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_files_and_functions_are_short() -> None:
    too_long = []
    for path in sources():
        text = path.read_text()
        if (lines := text.count("\n")) > FILE_LINES_MAX:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {FILE_LINES_MAX}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    too_long.append(
                        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines, at most {FUNCTION_LINES_MAX}"
                    )
    assert not too_long, "\n".join(too_long)


def test_names_say_something() -> None:
    assert not [path for path in sources() if path.stem in FORBIDDEN_NAMES or path.parent.name in FORBIDDEN_NAMES]


def test_pure_files_touch_neither_clock_nor_socket_nor_tensor() -> None:
    pure = [
        *sorted((ROOT / "lifecycle").glob("*.py")),
        *(ROOT / "engine" / name for name in ("pages.py", "page_copy.py", "sequence.py", "layout.py", "sampling_params.py")),
        *(
            ROOT / "kv_transfer" / name
            for name in (
                "grants.py",
                "grant_states.py",
                "reader_book.py",
                "writer_book.py",
                "grant_writer.py",
                "plan.py",
                "offer.py",
            )
        ),
        *(ROOT / name / "scheduler.py" for name in ("prefill_svc", "decode_svc")),
        *(ROOT / "router" / name for name in ("budget.py", "placement.py", "queue.py", "stream_log.py")),
        *(ROOT / "router" / name for name in ("member_facts.py", "pool_views.py", "turnstile.py", "unseen.py", "rates.py")),
        *(ROOT / "router" / name for name in ("cell_view.py", "cell_picture.py", "recent_ends.py")),
        *(ROOT / "router" / name for name in ("token_bucket.py", "tenant_limits.py", "token_file.py")),
        *(ROOT / "text" / name for name in ("stop_matcher.py", "detokeniser.py")),
        *(ROOT / "decode_svc" / name for name in ("stream_log.py", "moving.py", "pushing.py", "memory.py", "planning.py")),
        *(ROOT / "decode_svc" / name for name in ("preemption.py", "estimate.py", "host_pages.py", "kv_place.py", "progress.py")),
    ]
    banned = {"asyncio", "grpc", "redis", "torch", "time", "socket", "threading", "random"}
    found = []
    for path in pure:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            found += [f"{path.relative_to(ROOT)} imports {name}" for name in names if name.split(".")[0] in banned]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["router.__main__", "tandem_cli.main"])
def test_router_and_command_line_start_without_torch_and_nixl(module: str) -> None:
    program = (
        f"import sys, {module}\n"
        "loaded = {name.split('.')[0] for name in sys.modules} & "
        "{'torch', 'nixl', 'nixl_cu12', 'nixl_cu13', 'engine', 'kv_transfer', 'transformers'}\n"
        "sys.exit('loaded: ' + ', '.join(sorted(loaded)) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_picture_in_the_docs_is_the_table() -> None:
    assert f"```mermaid\n{mermaid()}\n```" in (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.slow
def test_generated_code_is_current() -> None:
    spec = importlib.util.spec_from_file_location("check_proto", ROOT / "tools" / "check_proto.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.differing_files() == []


@pytest.mark.slow
@pytest.mark.parametrize("tool", [["lint-imports"], ["buf", "lint"], ["ruff", "check", "."], ["ruff", "format", "--check", "."]])
def test_tools_are_content(tool: list[str]) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / tool[0]), *tool[1:]],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""The page of the ports is what the .proto files say, and a change that would break who uses them is caught."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import api_reference

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"
TIMEOUT_S = 120.0


@pytest.mark.slow
def test_the_page_is_current_and_has_every_field() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    ports = api_reference.descriptors()
    assert page == api_reference.page(ports), "run: make proto"
    client = [file for file in ports.file if file.package == api_reference.CLIENT_PACKAGE]
    names = [field.name for file in client for message in file.message_type for field in message.field]
    names += [value.name for file in client for enum in file.enum_type for value in enum.value]
    assert len(names) > 150
    assert not [name for name in names if f"`{name}`" not in page]
    assert "| 23 | `adapter` | string |" in page and "| `top_p` | optional float |" in page
    assert "buf:lint" not in page


def ports_changed(folder: Path, old: str, new: str) -> Path:
    """A copy of the ports with other words in the clients' one."""
    (folder / "buf.yaml").write_text((ROOT / "buf.yaml").read_text())
    for source in (ROOT / "proto").rglob("*.proto"):
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    port = folder / "proto" / "tandem" / "v1" / "inference.proto"
    text = port.read_text()
    assert text.count(old) == 1
    port.write_text(text.replace(old, new))
    return folder


def breaking(folder: Path) -> subprocess.CompletedProcess[str]:
    """What `make check` runs."""
    command = [str(BUF), "breaking", "--against", str(ROOT / "proto" / "baseline.binpb")]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("string model = 2;\n  // The prompt,", "uint64 model = 2;\n  // The prompt,", "changed type"),
        ("  string adapter = 23;\n", "  string adapter = 24;\n", "previously present field"),
        ("rpc Get(GetRequest) returns (GetResponse);", "", "previously present RPC"),
    ],
)
def test_a_breaking_change_is_caught(tmp_path: Path, old: str, new: str, told: str) -> None:
    done = breaking(ports_changed(tmp_path, old, new))
    assert done.returncode == 100, done.stdout + done.stderr
    assert told.lower() in done.stdout.lower()


@pytest.mark.slow
def test_a_new_field_breaks_nothing(tmp_path: Path) -> None:
    done = breaking(
        ports_changed(tmp_path, "  string adapter = 23;\n", "  string adapter = 23;\n  // More.\n  string more = 99;\n")
    )
    assert done.returncode == 0, done.stdout + done.stderr

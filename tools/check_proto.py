"""Proves that the committed code of the ports is what the .proto files give. Exit 1 names the files that differ."""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent / "proto"


def differing_files() -> list[str]:
    """Generated files, relative to proto/, that are missing or not current."""
    sources = sorted(str(path) for path in ROOT.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        library = files("grpc_tools").joinpath("_proto")
        if protoc.main(["protoc", f"-I{ROOT}", f"-I{library}", *outputs, *sources]) != 0:
            return sources
        made = {path.relative_to(folder) for path in Path(folder).rglob("*_pb2*.py*")}
        kept = {path.relative_to(ROOT) for path in ROOT.rglob("*_pb2*.py*") if "__pycache__" not in path.parts}
        stale = {path for path in made & kept if (Path(folder) / path).read_bytes() != (ROOT / path).read_bytes()}
        return sorted(str(path) for path in (made ^ kept) | stale)


def main() -> int:
    """Prints the verdict; 0 when everything is current."""
    differing = differing_files()
    if differing:
        print("not current, run `make proto`:", *differing, sep="\n  ")
        return 1
    print("==> generated code is current")
    return 0


if __name__ == "__main__":
    sys.exit(main())

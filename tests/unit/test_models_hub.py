"""The hub, played by a small HTTP server on this machine."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from models import PullFailed, PullProgress, list_models, resolve
from models.hub import is_hub_id, local_snapshot, pull_hub

COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(5000),
    "README.md": b"no part of the model",
    "onnx/model.json": b"{}",
}


class FakeHub(BaseHTTPRequestHandler):
    """Answers what snapshot_download asks for one repository, org/tiny."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/tiny"):
            self._send(json.dumps(self._listing(path)).encode(), {"Content-Type": "application/json"}, body)
            return
        name = path.partition(f"/org/tiny/resolve/{COMMIT}/")[2]
        if name in FILES:
            etag = hashlib.sha256(FILES[name]).hexdigest()
            self._send(FILES[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)
            return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _listing(self, path: str) -> object:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
        tree = [{"type": "file", "path": name, "size": len(data), "oid": "b" * 40} for name, data in FILES.items()]
        return tree if "/tree/" in path else {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}

    def _send(self, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.mark.slow
def test_a_model_comes_from_the_hub_with_its_own_files_only(hub: str, tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    path = pull_hub("org/tiny", tmp_path, seen.append, hub)
    assert {file.name for file in path.rglob("*")} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (seen[0].stage, seen[-1].stage) == ("asking the hub", "ready")
    assert seen[-1].done_bytes == seen[-1].total_bytes == 5004
    assert local_snapshot("org/tiny", tmp_path) == path
    ref = resolve("org/tiny", cache=tmp_path)
    assert (ref.name, ref.format, ref.path) == ("org/tiny", "safetensors", path)
    assert list_models(cache=tmp_path) == [ref]


@pytest.mark.slow
def test_an_unknown_model(hub: str, tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match="no model org/other"):
        pull_hub("org/other", tmp_path, lambda progress: None, hub)


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match=r"could not be asked for org/tiny.*name it by its path"):
        pull_hub("org/tiny", tmp_path, lambda progress: None, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/model-1.5_b", True),
        ("model", False),
        ("a/b/c", False),
        ("../x", False),
        ("a/..", False),
        ("a b/c", False),
        ("/x", False),
    ],
)
def test_hub_ids(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected

"""A real Prometheus over processes of this machine."""

import asyncio
import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.scaling.promtool import program

#: Between two scrapes, and the namespace that all targets are said to be in.
SCRAPE_S = 1
NAMESPACE = "test"
STOP_S = 20.0
ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running one."""

    address: str
    targets: Path

    def watch(self, ports: Mapping[str, int]) -> None:
        """Scrape these pods and no others, from the next look at the file on (a second at most)."""
        groups = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": NAMESPACE, "pod": pod}} for pod, port in ports.items()
        ]
        fresh = self.targets.with_suffix(".new")
        fresh.write_text(json.dumps(groups))
        fresh.replace(self.targets)

    async def ask(self, query: str) -> float | None:
        """The one number that a query answers; None where it has no answer."""
        return await asyncio.to_thread(self._ask, query)

    async def ready(self) -> bool:
        """Whether it answers."""
        try:
            return await self.ask("vector(1)") == 1.0
        except urllib.error.URLError:
            return False

    def _ask(self, query: str) -> float | None:
        page = f"{self.address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(page, timeout=ANSWER_S) as answer:
            result = json.load(answer)["data"]["result"]
        assert len(result) <= 1, f"{len(result)} elements: an autoscaler takes one"
        return float(result[0]["value"][1]) if result else None


@contextmanager
def running_prometheus(folder: Path) -> Iterator[Prometheus]:
    """With nothing to scrape yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    targets = folder / "targets.json"
    targets.write_text("[]")
    job = {"job_name": "tandem", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
    config = {"global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"}, "scrape_configs": [job]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    argv = [program("prometheus"), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}", targets)
    finally:
        process.terminate()
        process.wait(STOP_S)

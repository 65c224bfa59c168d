"""A Prometheus of the system that scrapes what a test tells it to, every second, with the rules of the chart."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from tools.dashboards import Prometheus

RULES = Path(__file__).resolve().parents[1] / "charts" / "tandem" / "rules"
SCRAPE_S = 1
START_S = 60.0
STOP_S = 20.0


def program(name: str) -> str:
    """`prometheus` or `promtool`. Without it the test skips, but in CI, where it has to be."""
    found = shutil.which(name)
    if found is None:
        assert os.environ.get("CI") != "true", f"{name} is not installed: apt-get install prometheus"
        pytest.skip(f"{name} is not installed: apt-get install prometheus")
    return found


@contextlib.contextmanager
def scraping(targets: Mapping[str, str], labels: Mapping[str, str], folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that reads `targets` (instance: host:port) with `labels`, once it answers. Its data are in `folder`."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(path) for path in quick_rules(folder)],
        "scrape_configs": [{"job_name": "tandem", "static_configs": _static(targets, labels)}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = _free_port()
    words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program("prometheus"), *words], stdout=log, stderr=log)
    try:
        answering = Prometheus(f"http://127.0.0.1:{port}")
        _wait(answering, process, folder / "prometheus.log")
        yield answering
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def quick_rules(folder: Path) -> Sequence[Path]:
    """The chart's rules, evaluated as often as is scraped: nobody wants to wait for the usual half a minute."""
    made = []
    for path in sorted(RULES.glob("*.yaml")):
        rules = yaml.safe_load(path.read_text())
        for group in rules["groups"]:
            group["interval"] = f"{SCRAPE_S}s"
        made.append(folder / path.name)
        made[-1].write_text(yaml.safe_dump(rules))
    return made


def _static(targets: Mapping[str, str], labels: Mapping[str, str]) -> list[dict[str, object]]:
    return [{"targets": [address], "labels": {**labels, "instance": name}} for name, address in targets.items()]


def _wait(answering: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(OSError, ValueError):
            if answering.now("vector(1)"):
                return
        assert time.monotonic() < until, f"Prometheus does not answer within {START_S} s: {log.read_text()[-2000:]}"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

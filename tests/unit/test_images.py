"""The images: what hadolint says, and that they hold what the chart starts. None of them is built here."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.unit.chart_render import chart, pods, rendered

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "images"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
EXTRAS = PROJECT["optional-dependencies"]
NAMES = ("base", "router", "prefill", "decode")
every_image = pytest.mark.parametrize("name", NAMES)


@dataclass
class Stage:
    """One FROM with what follows it, in order: (instruction, its words)."""

    image: str
    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [words for found, words in self.lines if found == instruction]


def stages(name: str) -> list[Stage]:
    text = (IMAGES / name / "Dockerfile").read_text()
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    made: list[Stage] = []
    defaults: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, words = line.partition(" ")
        if instruction == "FROM":
            image, _, alias = words.partition(" AS ")
            made.append(Stage(re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], image), alias))
        elif not made:
            key, _, value = words.partition("=")
            defaults[key] = value
        else:
            made[-1].lines.append((instruction, words))
    return made


@pytest.mark.slow
@every_image
def test_hadolint_finds_nothing(name: str) -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert linter is not None, "hadolint is missing; make setup installs it"
    done = subprocess.run(
        [linter, "--no-color", str(IMAGES / name / "Dockerfile")], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "")


@every_image
def test_bases_are_pinned_and_nothing_runs_as_root(name: str) -> None:
    pod = pods(rendered("minimal"))["router"]["spec"]["securityContext"]
    user = f"{pod['runAsUser']}:{pod['runAsGroup']}"
    made = stages(name)
    for stage in made:
        tag = stage.image.rpartition(":")[2]
        assert re.fullmatch(r"\d+\.\d+\.\d+(-[a-z]+)*", tag), stage.image
    last = made[-1]
    assert last.all("USER")[-1] == user
    assert last.all("HEALTHCHECK") == ["NONE"]
    # A shell in front of the process would keep SIGTERM from it, and with it the drain.
    assert not any(stage.all("CMD") for stage in made)
    assert isinstance(json.loads(last.all("ENTRYPOINT")[0]), list)


def test_the_base_makes_the_user_of_the_chart() -> None:
    context = pods(rendered("minimal"))["decode"]["spec"]["securityContext"]
    (run,) = stages("base")[-1].all("RUN")
    assert f"--gid {context['runAsGroup']} tandem" in run and f"--uid {context['runAsUser']} " in run
    env = {one["name"]: one.get("value") for one in pods(rendered("minimal"))["decode"]["spec"]["containers"][0]["env"]}
    assert f"mkdir -p {env['TANDEM_CACHE']}" in run
    (shown,) = stages("base")[-1].all("ENV")
    assert f"TANDEM_CACHE={env['TANDEM_CACHE']} " in shown and "PATH=/opt/tandem/bin:$PATH" in shown


@pytest.mark.parametrize("role", NAMES[1:])
def test_an_image_starts_what_the_chart_starts(role: str) -> None:
    (container,) = pods(rendered("minimal"))[role]["spec"]["containers"]
    assert json.loads(stages(role)[-1].all("ENTRYPOINT")[0]) == container["command"]
    assert (ROOT / container["command"][-1] / "__main__.py").exists()


@every_image
def test_tools_of_the_build_are_left_behind(name: str) -> None:
    made = stages(name)
    known = {stage.name for stage in made if stage.name}
    assert not any("apt-get" in run for run in made[-1].all("RUN"))
    for stage in made:
        for words in stage.all("COPY"):
            source = re.match(r"--from=(\S+) ", words)
            assert source[1] in known if source else words == ". ."
        assert stage.all("ADD") == []


def test_versions_are_those_of_the_project() -> None:
    version = PROJECT["version"]
    assert chart().metadata["appVersion"] == version
    base = stages("base")
    assert f'org.opencontainers.image.version="{version}"' in base[-1].all("LABEL")[0]
    (python,) = {stage.image for stage in base}
    minor = re.match(r"python:(\d+\.\d+)\.\d+-slim", python)
    assert minor is not None
    for role in NAMES[1:]:
        for stage in stages(role):
            assert stage.image == f"tandem-base:{version}"
            for words in stage.all("COPY"):
                assert words.count(f"/opt/tandem/lib/python{minor[1]}/site-packages/engine/native/brought") == 2


def test_extras_are_those_of_the_project() -> None:
    installs = {role: "\n".join(stages(role)[-1].all("RUN")) for role in NAMES[1:]}
    assert '.whl)[router]"' in installs["router"] and not any("torch" in one or "nixl" in one for one in EXTRAS["router"])
    for role in ("prefill", "decode"):
        assert '.whl)[$EXTRAS]"' in installs[role]
        assert "EXTRAS=pool" in stages(role)[-1].all("ARG") and "pool" in EXTRAS and "transformers" in EXTRAS
    (alone,) = EXTRAS["grammar"]
    assert f"--no-deps {alone}" in installs["decode"] and alone not in installs["prefill"]


def context(target: Path) -> None:
    """Copies what .dockerignore lets into a build."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    drop = [line.removeprefix("**/") for line in lines[1:] if not line.startswith("!")]
    ignore = shutil.ignore_patterns(*(one.rpartition("/")[2] for one in drop))
    for name in (line[1:] for line in lines if line.startswith("!")):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        else:
            shutil.copy(source, target / name)


@pytest.mark.slow
def test_the_context_of_a_build_makes_the_whole_package(tmp_path: Path) -> None:
    context(tmp_path)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheels", "."]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=280)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        folder = package.replace(".", "/")
        source = ROOT / "proto" / folder if package.startswith("tandem.") or package == "tandem" else ROOT / folder
        for path in source.glob("*"):
            if path.suffix in (".py", ".lua", ".h", ".cpp"):
                assert f"{folder}/{path.name}" in held
    assert any(name.endswith(".lua") for name in held) and "engine/native/src/step.cpp" in held
    assert not [name for name in held if name.startswith(("tests/", "bench/", "tools/"))]

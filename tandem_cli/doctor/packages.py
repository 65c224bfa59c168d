"""Packages that this one asks for, against those that are here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

DISTRIBUTION = "tandem-serving"
#: What a cell of one machine needs.
EXTRAS = ("router", "pool")


@dataclass(frozen=True, slots=True)
class Packages:
    """By name: what is missing, with what is asked for; what is here in another version, in words. seen: how many there are."""

    missing: dict[str, str]
    wrong: dict[str, str]
    seen: int


def read_packages(extras: Iterable[str] = EXTRAS) -> Packages:
    """Of the installed distribution; empty where it runs from a folder without being installed."""
    try:
        asked = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return Packages({DISTRIBUTION: "it runs from a folder"}, {}, 0)
    return compare(asked, extras, _installed)


def compare(asked: Iterable[str], extras: Iterable[str], installed: Callable[[str], str | None]) -> Packages:
    """asked: requirements as metadata has them. installed: a function from a name to its version, None for none."""
    missing, wrong, seen = {}, {}, 0
    for requirement in (Requirement(line) for line in asked):
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        seen += 1
        found = installed(requirement.name)
        if found is None:
            missing[requirement.name] = str(requirement.specifier) or "any version"
        elif not requirement.specifier.contains(found, prereleases=True):
            wrong[requirement.name] = f"{found}, wanted is {requirement.specifier}"
    return Packages(missing, wrong, seen)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

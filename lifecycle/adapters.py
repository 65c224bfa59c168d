"""An adapter as requests and members name it. Pure."""

from dataclasses import dataclass

#: Longest name, in characters.
NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True, order=True)
class Adapter:
    """identity: of its content. Members that have other content under one name have other adapters."""

    name: str
    identity: str

"""Typed reading of GGUF metadata: each accessor names the field when its value is missing or of another kind."""

from collections.abc import Mapping, Sequence

from text.errors import UnsupportedModel


class GgufFields:
    """A view on the metadata of one GGUF file (field name -> value)."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def has(self, field: str) -> bool:
        """Whether the file has the field."""
        return field in self._metadata

    def names(self) -> list[str]:
        """All field names."""
        return list(self._metadata)

    def text(self, field: str, default: str | None = None) -> str:
        """A string field."""
        value = self._metadata.get(field, default)
        if not isinstance(value, str):
            raise self._wrong(field, value, "a string")
        return value

    def integer(self, field: str, default: int | None = None) -> int:
        """An integer field."""
        value = self._metadata.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(field, value, "an integer")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A float or integer field."""
        value = self._metadata.get(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(field, value, "a number")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """A boolean field."""
        value = self._metadata.get(field, default)
        if not isinstance(value, bool):
            raise self._wrong(field, value, "true or false")
        return value

    def texts(self, field: str) -> Sequence[str]:
        """A list of strings."""
        value = self._metadata.get(field)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(field, value, "a list of strings")
        return value

    def numbers(self, field: str) -> Sequence[float]:
        """A list of numbers."""
        value = self._metadata.get(field)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self._wrong(field, value, "a list of numbers")
        return value

    def _wrong(self, field: str, value: object, wanted: str) -> UnsupportedModel:
        if value is None:
            return UnsupportedModel(f"The GGUF file has no field {field}; it must be {wanted}.")
        return UnsupportedModel(f"The GGUF field {field} is {value!r:.60}; it must be {wanted}.")

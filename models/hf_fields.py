"""Typed reading of a Hugging Face JSON object."""

from collections.abc import Mapping

from text.errors import UnsupportedModel


class HfFields:
    """The values of a JSON object; `where` is named in errors. A field that is null counts as missing."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, field: str) -> object:
        """The value as it is; None when it is missing."""
        return self.values.get(field)

    def integer(self, field: str, default: int | None = None) -> int:
        """Raises UnsupportedModel."""
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(field, value, "an integer")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Raises UnsupportedModel."""
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(field, value, "a number")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """Raises UnsupportedModel."""
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(field, value, "true or false")
        return value

    def settings(self, value: object) -> Mapping[str, object]:
        """A value that is an object with settings, empty when it is missing. Raises UnsupportedModel."""
        value = value or {}
        if not isinstance(value, dict):
            raise UnsupportedModel(f"The rope settings in {self.where} must be an object.")
        return value

    def _wrong(self, field: str, value: object, wanted: str) -> UnsupportedModel:
        if value is None:
            return UnsupportedModel(f"{self.where} has no {field}; it must be {wanted}.")
        return UnsupportedModel(f"{field} in {self.where} is {value!r:.60}; it must be {wanted}.")


def ids_of(value: object) -> frozenset[int]:
    """Ids of a field that is one id, a list of them, or null."""
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def refuse_quantised(fields: HfFields) -> None:
    """Raises UnsupportedModel for weights that are not stored as numbers of a floating point type."""
    if fields.get("quantization_config") is not None:
        raise UnsupportedModel(
            f"{fields.where} has a quantization_config; use the model's unquantised weights or a GGUF file of it."
        )

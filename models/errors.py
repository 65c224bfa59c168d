"""What can go wrong before a model runs. Messages say what to do."""

from text.errors import UnsupportedModel


class ModelError(Exception):
    """Base of the errors of this package; UnsupportedModel stands beside it because text raises it too."""


class ModelNotFound(ModelError):
    """No such model on this machine."""


class PullFailed(ModelError):
    """A model could not be fetched, or what came is not what was promised. Nothing half-done is left in the cache."""


__all__ = ["ModelError", "ModelNotFound", "PullFailed", "UnsupportedModel"]

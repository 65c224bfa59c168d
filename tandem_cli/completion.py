"""What a shell may complete beyond commands and options."""

import models


def model_names(incomplete: str) -> list[str]:
    """Models that can be named here: those that are known by name, and those in the cache folder."""
    known = dict.fromkeys([*models.WHEEL_MODELS, *(ref.name for ref in models.list_models())])
    return [name for name in known if name.startswith(incomplete)]

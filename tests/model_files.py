"""The default model for tests, fetched once into the cache folder if it is not there (the same as `tandem models pull`)."""

from functools import lru_cache

import models


@lru_cache(maxsize=1)
def default_model() -> models.ModelRef:
    return models.pull(models.DEFAULT_MODEL)


@lru_cache(maxsize=1)
def default_tokenizer() -> models.Tokenizer:
    return models.load_tokenizer(default_model())

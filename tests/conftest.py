"""What tests of every kind share."""

import pytest
from hypothesis import settings

from models import Tokenizer, load_tokenizer
from tests.model_files import default_model

# An example's time says how busy the machine is, not whether the code is right.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The default model's tokenizer."""
    return load_tokenizer(default_model())

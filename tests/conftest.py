"""What tests of every kind share."""

import pytest

from models import Tokenizer, load_tokenizer
from tests.model_files import default_model


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The default model's tokenizer."""
    return load_tokenizer(default_model())

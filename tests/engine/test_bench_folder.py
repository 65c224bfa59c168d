"""The folder that `make bench-peer` gives to both sides is the model that it was made of."""

from pathlib import Path

import pytest
import torch

import models
from bench.peer.model import shared_folder
from engine.weights_gguf import GgufSource
from engine.weights_safetensors import SafetensorsSource
from tests.reference import default_model


@pytest.mark.slow
def test_the_exported_folder_is_the_same_model(tmp_path: Path) -> None:
    ref = default_model()
    folder = shared_folder(ref, tmp_path)
    assert shared_folder(ref, tmp_path) == folder
    exported = models.resolve(str(folder))
    config, theirs = models.load_config(ref), models.load_config(exported)
    assert theirs == models.ModelConfig(**{**_fields(config), "rope_interleaved": False})
    source, made = GgufSource(ref.path, config), SafetensorsSource(folder)
    assert made.names() == source.names() - {"lm_head.weight"}
    for name in made.names():
        assert torch.equal(made.read(name, torch.bfloat16), source.read(name, torch.bfloat16)), name
    text = "Ein Satz mit 1234 Ziffern, 水は零度で\n\n  def f(x):\n<|im_end|>"
    assert models.load_tokenizer(exported).encode(text) == models.load_tokenizer(ref).encode(text)


def _fields(config: models.ModelConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__slots__}

"""Models on this machine: finding and fetching them, their shape, their tokenizer. No torch."""

from collections.abc import Mapping
from pathlib import Path

from models.config import ARCHITECTURES, ModelConfig
from models.errors import ModelError, ModelNotFound, PullFailed, UnsupportedModel
from models.gguf_config import from_gguf
from models.gguf_header import GgufHeader, TensorInfo, read_header
from models.hf_config import from_hf_json
from models.module_config import ModuleConfig
from models.ref import ModelRef, PullProgress
from models.rope import RopeConfig, RopeKind
from models.store import DEFAULT_MODEL, list_models, pull, resolve
from models.wheel import WHEEL_MODELS
from text import Tokenizer
from text import from_gguf as tokenizer_from_gguf
from text import from_hf_directory as tokenizer_from_directory


def load_config(ref: ModelRef) -> ModelConfig | ModuleConfig:
    """The model's shape; a ModuleConfig where transformers' own modules compute it. Raises UnsupportedModel."""
    if ref.format == "gguf":
        return from_gguf(read_header(ref.path))
    return from_hf_json(ref.path / "config.json")


def load_tokenizer(ref: ModelRef) -> Tokenizer:
    """The model's tokenizer, with its chat template. Raises UnsupportedModel, text.ChatTemplateError."""
    if ref.format == "gguf":
        return tokenizer_from_gguf(read_header(ref.path).metadata)
    return tokenizer_from_directory(ref.path)


def gguf_metadata(path: Path) -> Mapping[str, object]:
    """Metadata of a GGUF file by field name. Raises UnsupportedModel."""
    return read_header(path).metadata


__all__ = [
    "ARCHITECTURES",
    "DEFAULT_MODEL",
    "WHEEL_MODELS",
    "GgufHeader",
    "ModelConfig",
    "ModelError",
    "ModelNotFound",
    "ModelRef",
    "ModuleConfig",
    "PullFailed",
    "PullProgress",
    "RopeConfig",
    "RopeKind",
    "TensorInfo",
    "Tokenizer",
    "UnsupportedModel",
    "gguf_metadata",
    "list_models",
    "load_config",
    "load_tokenizer",
    "pull",
    "read_header",
    "resolve",
]

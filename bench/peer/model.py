"""One set of weights for both sides: a model as a Hugging Face folder in bfloat16."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

import models
from engine.weights_gguf import GgufSource
from models.config import ModelConfig
from models.ref import ModelRef
from models.rope import RopeKind

#: What the exported folder is called, after the first digits of the file's snapshot; a new version is exported anew.
VERSION = "bf16-v1"


def shared_folder(ref: ModelRef, cache: Path) -> Path:
    """The model as a folder that both sides load; made in `cache` at the first call, out of a GGUF file. Raises ValueError."""
    if ref.format != "gguf":
        return ref.path
    folder = cache / f"{ref.name}-{ref.snapshot[:12]}-{VERSION}"
    if folder.is_dir():
        return folder
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _export(ref, partial)
    partial.rename(folder)
    return folder


def _export(ref: ModelRef, folder: Path) -> None:
    config = models.load_config(ref)
    source = GgufSource(ref.path, config)
    tensors = {name: source.read(name, torch.bfloat16).contiguous() for name in sorted(source.names())}
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = models.load_tokenizer(ref)
    tokenizer.save(folder / "tokenizer.json")
    end = tokenizer.token(min(config.eos_ids)) if config.eos_ids else None
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": config.context_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=1))
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=1))


def hf_config(config: ModelConfig) -> dict[str, object]:
    """A shape as config.json spells it. Raises ValueError for what a plain Llama folder cannot say."""
    if config.architecture != "llama" or config.rope.kind is not RopeKind.DEFAULT or config.sliding_window is not None:
        raise ValueError(f"the comparison exports Llama models without rope scaling, not {config.architecture}; give a folder")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocabulary_size,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_id,
        "eos_token_id": sorted(config.eos_ids),
        "torch_dtype": "bfloat16",
    }

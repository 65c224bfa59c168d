"""Reading weights: sharded safetensors, GGUF in both row orders, and files that do not hold what they say."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.weights import WeightsError
from engine.weights_gguf import PER_LAYER, PER_LAYER_POST_NORMS, WHOLE_MODEL
from models import ModelRef
from tests.engine import tiny_models
from tests.engine.tiny_models import Driver, prompt
from tests.reference import all_logits


def logits_of(ref: ModelRef, ids: list[int]) -> torch.Tensor:
    return Driver(tiny_models.load(ref)).feed("a", ids)


def assert_same_model(ref: ModelRef, model: PreTrainedModel, tolerance: float = 1e-4) -> None:
    ids = prompt(30)
    expected = all_logits(model, ids)[-1]
    torch.testing.assert_close(logits_of(ref, ids), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_sharded_safetensors(tmp_path: Path) -> None:
    model = tiny_models.build("llama-biases")
    ref = tiny_models.save(model, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_model(ref, model)


def test_half_precision_files_are_read(tmp_path: Path) -> None:
    ref = tiny_models.save(tiny_models.build("qwen2").to(torch.float16), tmp_path)
    model = tiny_models.build("qwen2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.float16))
    assert_same_model(ref, model)


def edit(ref: ModelRef, change: dict[str, torch.Tensor | None]) -> None:
    file = ref.path / "model.safetensors"
    tensors = load_file(file) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ({"model.norm.weight": torch.ones(7)}, r"model\.norm\.weight has shape \[7\]; the configuration says \[48\]"),
        ({"model.layers.0.self_attn.sinks": torch.ones(6)}, "self_attn.sinks"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}, "no place in a llama decoder"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.int8)}, "stored as I8"),
    ],
)
def test_files_that_do_not_fit_their_configuration(tmp_path: Path, change: dict[str, torch.Tensor | None], named: str) -> None:
    ref = tiny_models.save(tiny_models.build("llama"), tmp_path)
    edit(ref, change)
    with pytest.raises(WeightsError, match=named):
        tiny_models.load(ref)


def test_broken_files_say_what_to_do(tmp_path: Path) -> None:
    ref = tiny_models.save(tiny_models.build("llama"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json at all")
    with pytest.raises(WeightsError, match="fetch the model again"):
        tiny_models.load(ref)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="weight_map"):
        tiny_models.load(ref)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    quantise: gguf.GGMLQuantizationType | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> ModelRef:
    """What llama.cpp's converter writes, as far as our readers look; query and key rows are permuted for architecture llama."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    gemma3 = architecture == "gemma3"
    writer.add_rope_freq_base((config.rope_parameters["full_attention"] if gemma3 else config.rope_parameters)["rope_theta"])
    if gemma3:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    per_layer = PER_LAYER_POST_NORMS if gemma3 else PER_LAYER
    names = {ours: theirs for theirs, ours in (per_layer | WHOLE_MODEL).items()}
    for name, tensor in model.state_dict().items():
        if gemma3 and name == "lm_head.weight":
            continue
        values = tensor.numpy() + (1 if gemma3 and "norm" in name else 0)
        stem, _, kind = name.rpartition(".")
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            values = interleave(values, config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads)
        if stem.startswith("model.layers."):
            _, _, index, part = stem.split(".", 3)
            target = f"blk.{index}.{names[part]}.{kind}"
        else:
            target = f"{names[stem]}.{kind}"
        if quantise is not None and values.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(values, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelRef("tiny", path, "gguf", "1" * 64)


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    head_dim = values.shape[0] // heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]
    return values[order]


@pytest.mark.parametrize(("variant", "architecture"), [("llama", "llama"), ("qwen2", "qwen2"), ("llama-biases", "llama")])
def test_gguf_row_orders(tmp_path: Path, variant: str, architecture: str) -> None:
    model = tiny_models.build(variant)
    if variant == "llama-biases":
        model = tiny_models.build(variant, mlp_bias=False)
    assert_same_model(write_gguf(model, tmp_path / "tiny.gguf", architecture), model)


def test_gguf_gemma3(tmp_path: Path) -> None:
    """Every sixth layer sees everything, and the weights of norms come with their one."""
    model = tiny_models.build("gemma3", num_hidden_layers=7, sliding_window_pattern=6, query_pre_attn_scalar=16)
    assert model.config.layer_types.count("full_attention") == 1
    assert_same_model(write_gguf(model, tmp_path / "tiny.gguf", "gemma3"), model)


def test_gguf_is_dequantised(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    model = tiny_models.build("llama", **shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)))
    ref = write_gguf(model, tmp_path / "tiny.gguf", "llama", gguf.GGMLQuantizationType.Q8_0)
    assert_same_model(ref, model)


def test_a_gguf_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    ref = write_gguf(
        tiny_models.build("llama"), tmp_path / "tiny.gguf", "llama", extra={"blk.0.attn_sinks.weight": np.ones(6, np.float32)}
    )
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_sinks\.weight"):
        tiny_models.load(ref)


def test_the_factors_of_a_gguf_rope_are_no_unused_tensor(tmp_path: Path) -> None:
    """rope_freqs.weight is part of the configuration; ones change nothing."""
    model = tiny_models.build("llama")
    half = model.config.head_dim // 2
    ref = write_gguf(model, tmp_path / "tiny.gguf", "llama", extra={"rope_freqs.weight": np.ones(half, np.float32)})
    assert_same_model(ref, model)
    stretched = tmp_path / "stretched.gguf"
    linear = tiny_models.build("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    assert_same_model(write_gguf(linear, stretched, "llama", extra={"rope_freqs.weight": np.full(half, 4.0, np.float32)}), linear)

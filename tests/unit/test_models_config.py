"""Shapes from GGUF headers and from config.json."""

import json
from pathlib import Path

import pytest

from models import ModelConfig, RopeKind, UnsupportedModel, load_config
from models.config import LIMITS, Activation, LatentConfig
from models.gguf_config import from_gguf
from models.gguf_header import GgufHeader, TensorInfo
from models.hf_config import from_hf_json, from_hf_values
from tests.model_files import default_model, default_tokenizer

EMBEDDING = {"token_embd.weight": TensorInfo((100, 64), 0, 0)}


def header(
    architecture: str = "llama", tensors: tuple[str, ...] = (), divisors: tuple[float, ...] = (), **more: object
) -> GgufHeader:
    values: dict[str, object] = {
        "block_count": 2,
        "embedding_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "feed_forward_length": 128,
        "context_length": 512,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    metadata: dict[str, object] = {f"{architecture}.{name}": value for name, value in values.items() if value is not None}
    metadata |= {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5}
    return GgufHeader(metadata, EMBEDDING | {name: TensorInfo((64,), 0, 0) for name in tensors}, divisors)


def gemma3_header(**more: object) -> GgufHeader:
    return header("gemma3", **{"attention__sliding_window": 32, "attention__key_length": 16, "block_count": 7, **more})


def hf(**more: object) -> ModelConfig:
    values: dict[str, object] = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        **more,
    }
    return from_hf_values({name: value for name, value in values.items() if value is not None})


def test_the_default_model() -> None:
    config = load_config(default_model())
    assert (config.architecture, config.layers, config.hidden, config.heads, config.kv_heads) == ("llama", 30, 576, 9, 3)
    assert (config.head_dim, config.intermediate, config.context_tokens) == (64, 1536, 8192)
    assert config.vocabulary_size == default_tokenizer().vocabulary_size
    assert (config.rope.kind, config.rope.theta, config.rope_interleaved) == (RopeKind.DEFAULT, 100000.0, True)
    assert config.tie_embeddings
    assert not (config.attention_bias or config.mlp_bias or config.qk_norm)
    assert config.eos_ids <= default_tokenizer().eos_ids


def test_gguf_says_what_the_tensors_say() -> None:
    plain = from_gguf(header())
    assert (plain.tie_embeddings, plain.attention_bias, plain.qk_norm, plain.eos_ids) == (True, False, False, {2, 5})
    qwen2 = from_gguf(header("qwen2", ("output.weight", "blk.0.attn_q.bias")))
    assert (qwen2.tie_embeddings, qwen2.attention_bias, qwen2.attention_output_bias, qwen2.rope_interleaved) == (
        False,
        True,
        False,
        False,
    )
    qwen3 = from_gguf(header("qwen3", ("blk.0.attn_q_norm.weight",), attention__key_length=32, attention__value_length=32))
    assert (qwen3.qk_norm, qwen3.head_dim) == (True, 32)


def test_gguf_rope() -> None:
    assert from_gguf(header()).rope.kind is RopeKind.DEFAULT
    linear = from_gguf(header(rope__scaling__type="linear", rope__scaling__factor=4.0)).rope
    assert (linear.kind, linear.factor) == (RopeKind.LINEAR, 4.0)
    assert from_gguf(header(rope__scale_linear=2.0)).rope.factor == 2.0
    yarn = from_gguf(
        header(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=128)
    ).rope
    assert (yarn.kind, yarn.original_context_tokens) == (RopeKind.YARN, 128)
    assert yarn.attention_factor == pytest.approx(1.1386294)
    divisors = from_gguf(header(divisors=(1.0,) * 8)).rope
    assert (divisors.kind, len(divisors.divisors)) == (RopeKind.DIVISORS, 8)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (header("gemma2"), "architecture is 'gemma2'; llama, qwen2, qwen3, gemma3"),
        (header(expert_count=8), "mixture of experts"),
        (header(rope__dimension_count=8), "rotates 8 of 16 dimensions"),
        (header(attention__value_length=8), "value_length is 8"),
        (header(rope__scaling__type="longrope"), "'longrope'.*none, linear and yarn"),
        (header(divisors=(1.0,) * 3), "head_dim 16 needs 8"),
        (header(divisors=(1.0,) * 8, rope__scaling__type="yarn"), "only one"),
        (header(block_count=None), "no field llama.block_count"),
        (header(block_count=1 << 20), "layers is 1048576; 1 to 1024"),
        (header(attention__head_count=0), "head_count is 0"),
        (header(attention__head_count_kv=3), "no multiple"),
        (header(attention__head_count_kv=[1, 2]), "must be an integer"),
        (header(attention__layer_norm_rms_epsilon=0.0), "rms_eps"),
        (header(rope__freq_base=0.5), "theta is 0.5"),
        (header(logit_scale=0.5), "logit_scale"),
        (header("gemma3"), "gemma3.attention.sliding_window is 0"),
        (gemma3_header(attention__sliding_window_pattern=0), "sliding_window_pattern is 0"),
        (gemma3_header(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (GgufHeader(header().metadata, {}, ()), "no matrix token_embd.weight"),
    ],
)
def test_gguf_refusals_name_the_field(bad: GgufHeader, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        from_gguf(bad)


def test_hf_llama() -> None:
    config = hf(eos_token_id=[2, 3], bos_token_id=1)
    assert (config.head_dim, config.eos_ids, config.bos_id, config.rope_interleaved) == (16, {2, 3}, 1, False)
    assert hf(num_key_value_heads=None).kv_heads == 4
    biased = hf(attention_bias=True, mlp_bias=True)
    assert (biased.attention_bias, biased.attention_output_bias, biased.mlp_bias) == (True, True, True)


def test_hf_qwen() -> None:
    qwen2 = hf(model_type="qwen2", use_sliding_window=False, sliding_window=128, tie_word_embeddings=True)
    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.sliding_window, qwen2.tie_embeddings) == (
        True,
        False,
        None,
        True,
    )
    qwen3 = hf(model_type="qwen3", head_dim=None)
    assert (qwen3.qk_norm, qwen3.head_dim, qwen3.attention_bias) == (True, 128, False)


def test_hf_windows() -> None:
    assert hf(model_type="mistral", sliding_window=128).sliding_window == 128
    assert hf(model_type="mistral", sliding_window=4096).sliding_window is None  # wider than the context
    assert hf(model_type="mistral", sliding_window=None).sliding_window is None
    window = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128}
    assert hf(**window, max_window_layers=0).sliding_window == 128
    assert hf(**window, max_window_layers=2).sliding_window is None
    assert hf(**window, layer_types=["sliding_attention"] * 2).sliding_window == 128
    mixed = hf(**window, max_window_layers=1)
    assert [mixed.window(layer) for layer in range(2)] == [None, 128]
    with pytest.raises(UnsupportedModel, match="of kind chunked_attention; full_attention and sliding_attention"):
        hf(**window, layer_types=["full_attention", "chunked_attention"])


def gemma3(**more: object) -> ModelConfig:
    sizes = {"num_hidden_layers": 7, "sliding_window": 32, "head_dim": 16, "hidden_act": None}
    return hf(**{"model_type": "gemma3_text", **sizes, **more})


def test_hf_gemma3() -> None:
    config = gemma3(query_pre_attn_scalar=64)
    assert [config.window(layer) for layer in range(7)] == [32, 32, 32, 32, 32, None, 32]
    assert (config.architecture, config.activation, config.tie_embeddings) == ("gemma3", Activation.GELU_TANH, True)
    assert (config.query_scale, config.embedding_scale) == (0.125, 8.0)
    assert (config.qk_norm, config.post_norms, config.norms_add_one, config.attention_bias) == (True, True, True, False)
    assert (config.rope.theta, config.window_rope and config.window_rope.theta) == (1_000_000.0, 10_000.0)
    # As wide as the context it hides nothing, and its layers still have positions of their own.
    assert gemma3(sliding_window=512).window(0) == 512


LATENT = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
    "rms_norm_eps": 1e-6,
}


def test_hf_latent_attention() -> None:
    config = hf(**LATENT, num_key_value_heads=4)
    assert config.latent == LatentConfig(20, 12, 4, 10, 24, rope_interleaved=True)
    # To the KV cache it is one head of the size of a latent.
    assert (config.kv_heads, config.head_dim, config.query_scale) == (1, 24, 0.25)
    assert hf(**{**LATENT, "q_lora_rank": None, "rope_interleave": False}).latent == LatentConfig(20, 12, 4, 10, None, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_k_dense_replace": 1}, "first_k_dense_replace in config.json is 1 of 2 layers; mixtures of experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps in config.json is 1e-05; 1e-06 is supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 40.0}}, "rope_type in config.json is yarn; only default"),
        ({"kv_lora_rank": None}, "has no kv_lora_rank"),
        ({"kv_lora_rank": 5000}, "kv_lora_rank in config.json is 5000; 1 to 4096"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim in config.json is 3; rotary positions need an even number"),
        ({"v_head_dim": 0}, "v_head_dim in config.json is 0"),
        ({"kv_lora_rank": 2048}, "head_dim is 2052; 1 to 1024"),
    ],
)
def test_hf_latent_refusals_name_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        hf(**{**LATENT, **change})


def test_hf_gemma3_in_both_spellings() -> None:
    stretched = {"rope_type": "linear", "factor": 8.0}
    old = gemma3(rope_theta=5e5, rope_local_base_freq=5e3, rope_scaling=stretched, sliding_window_pattern=2)
    new = gemma3(
        layer_types=["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
        rope_parameters={
            "full_attention": {**stretched, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    )
    assert old == new
    assert (old.rope.kind, old.full_layers) == (RopeKind.LINEAR, {1, 3, 5})


def test_gguf_gemma3() -> None:
    """The file holds what the original holds, but for the one of the norms, which the converter has added."""
    scaled = from_gguf(gemma3_header(rope__freq_base=1e6, attention__layer_norm_rms_epsilon=1e-6))
    theirs = gemma3(query_pre_attn_scalar=16, rms_norm_eps=1e-6)
    assert not scaled.norms_add_one
    for name in ("full_layers", "sliding_window", "window_rope", "rope", "activation", "embedding_scale", "post_norms"):
        assert getattr(scaled, name) == getattr(theirs, name), name
    assert scaled.query_scale is None and theirs.query_scale == scaled.head_dim**-0.5
    assert from_gguf(gemma3_header(block_count=62)).query_scale == 0.25  # the largest model: hidden / heads


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def test_hf_rope_in_both_spellings() -> None:
    old = hf(rope_theta=500000.0, rope_scaling=LLAMA3).rope
    new = hf(rope_parameters={**LLAMA3, "rope_theta": 500000.0}).rope
    assert old == new
    assert (old.kind, old.theta, old.factor, old.original_context_tokens) == (RopeKind.LLAMA3, 500000.0, 8.0, 256)
    assert hf(rope_scaling={"type": "linear", "factor": 2}).rope.kind is RopeKind.LINEAR
    assert hf(rope_scaling={"type": "dynamic", "factor": 2.0}).rope.kind is RopeKind.DEFAULT
    yarn = hf(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False}).rope
    assert (yarn.kind, yarn.original_context_tokens, yarn.truncate) == (RopeKind.YARN, 128, False)
    assert yarn.attention_factor == pytest.approx(1.1386294)
    scaled = hf(rope_scaling={"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}).rope
    assert scaled.attention_factor == 1.0
    uneven = hf(rope_scaling={"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}).rope
    assert uneven.attention_factor == pytest.approx(1.2608037 / 1.3688879)  # (0.0707 ln 40 + 1) / (0.1 ln 40 + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "model_type in config.json is None; it must name the model's architecture"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_local_experts": 8}, "mixtures of experts"),
        ({"hidden_size": "64"}, "hidden_size in config.json is '64'; it must be an integer"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"head_dim": 15}, "even number"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'; default, linear, dynamic, llama3 and yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "must rise"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"attention_bias": "yes"}, "true or false"),
        ({"model_type": "gemma3_text", "hidden_act": None, "hidden_activation": "gelu"}, "hidden_activation"),
        ({"model_type": "gemma3_text", "hidden_act": None, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "hidden_act": None, "use_bidirectional_attention": True}, "causal"),
        ({"model_type": "gemma3_text", "hidden_act": None, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"model_type": "gemma3_text", "hidden_act": None, "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"model_type": "gemma3_text", "hidden_act": None, "sliding_window": 0}, "sliding_window is 0"),
        ({"rms_norm_eps": "small"}, "must be a number"),
        *(({name: 1 << 40}, "are supported") for name in ("vocab_size", "max_position_embeddings", "intermediate_size")),
    ],
)
def test_hf_refusals_name_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        hf(**change)


def test_config_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[]")
    with pytest.raises(UnsupportedModel, match="JSON object"):
        from_hf_json(file)
    file.write_text("{")
    with pytest.raises(UnsupportedModel, match="is not JSON"):
        from_hf_json(file)


@pytest.mark.slow
def test_b30_files_that_transformers_writes_can_be_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for name in ("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config"):
        theirs = getattr(transformers, name)(
            **sizes, vocab_size=100, rope_parameters={"rope_type": "default", "rope_theta": 12345.0}
        )
        theirs.save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
        ours = from_hf_json(tmp_path / "config.json")
        assert (ours.hidden, ours.layers, ours.kv_heads, ours.rope.theta) == (64, 2, 2, 12345.0)
        assert ours.head_dim == getattr(theirs, "head_dim", None) or 16
        assert ours.eos_ids >= {7, 8}


def test_every_limit_is_a_field() -> None:
    assert set(LIMITS) <= set(ModelConfig.__dataclass_fields__)

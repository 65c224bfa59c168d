"""Shapes of models that transformers' own modules compute, out of config.json."""

import pytest

from models import ModuleConfig, UnsupportedModel
from models.config import LIMITS
from models.hf_config import from_hf_values

NEOX: dict[str, object] = {
    "model_type": "gpt_neox",
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "vocab_size": 131,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
}
GPT2: dict[str, object] = {
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 48,
    "n_head": 6,
    "vocab_size": 131,
    "n_positions": 160,
    "n_ctx": 160,
}


def module(given: dict[str, object] = NEOX, **more: object) -> ModuleConfig:
    values = {name: value for name, value in {**given, **more}.items() if value is not None}
    config = from_hf_values(values, more_eos=frozenset({7}))
    assert isinstance(config, ModuleConfig)
    return config


def test_the_usual_names() -> None:
    assert module() == ModuleConfig("gpt_neox", 3, 6, 6, 8, 131, 160, 1, frozenset({2, 5, 7}))
    assert (module(num_key_value_heads=2, head_dim=16).kv_heads, module(head_dim=16).head_dim) == (2, 16)


def test_the_names_of_older_files() -> None:
    assert module(GPT2) == ModuleConfig("gpt2", 3, 6, 6, 8, 131, 160, None, frozenset({7}))
    assert module(GPT2, model_type="gpt_bigcode", multi_query=True).kv_heads == 1
    assert module(multi_query=False).kv_heads == 6


def test_heads_of_latent_attention_are_whole() -> None:
    config = module(model_type="minicpm3", qk_nope_head_dim=8, qk_rope_head_dim=4, head_dim=4, num_key_value_heads=6)
    assert (config.kv_heads, config.head_dim) == (6, 12)


def test_the_context_ends_where_rotary_frequencies_change_for_a_whole_step() -> None:
    long = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    assert module(rope_scaling={**long, "original_max_position_embeddings": 40}).context_tokens == 40
    assert module(rope_parameters=long, original_max_position_embeddings=50).context_tokens == 50
    assert module(rope_scaling={"type": "su"}, original_max_position_embeddings=60).context_tokens == 60
    layers = {"full_attention": {**long, "original_max_position_embeddings": 70}, "sliding_attention": {"rope_type": "default"}}
    assert module(rope_parameters=layers).context_tokens == 70
    assert module(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}).context_tokens == 160


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_encoder_decoder": True}, "gpt_neox cannot be served: it has an encoder, and only decoders are served"),
        ({"is_encoder_decoder": "yes"}, "is_encoder_decoder in config.json is 'yes'; it must be true or false"),
        ({"vision_config": {}}, "gpt_neox cannot be served: vision_config in config.json describes a part of it"),
        ({"text_config": {"hidden_size": 8}}, "gpt_neox cannot be served: text_config"),
        (
            {"layer_types": ["full_attention", "linear_attention", "conv"]},
            "it has layers of kind conv, linear_attention, and only",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config; use the model's unquantised weights"),
        (
            {"num_attention_heads": None},
            "gpt_neox cannot be served: config.json has no num_attention_heads, nor n_head or n_heads",
        ),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers, nor n_layer or n_layers or num_layers"),
        ({"max_position_embeddings": None}, "config.json has no max_position_embeddings"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
        ({"hidden_size": "48"}, "hidden_size in config.json is '48'; it must be an integer"),
        ({"num_attention_heads": 0}, "heads is 0; it must be at least 1"),
        ({"num_key_value_heads": 4}, "heads \\(6\\) are no multiple of its kv_heads \\(4\\)"),
        ({"head_dim": 9}, "head_dim is 9"),
        ({"vocab_size": 1 << 40}, f"vocabulary_size is {1 << 40}; 1 to {LIMITS['vocabulary_size']} are supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope settings of config.json has no original_max_position_embeddings"),
    ],
)
def test_refusals_name_the_field_or_the_reason(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        module(**change)


def test_layers_that_see_all_or_a_window_are_served() -> None:
    assert module(layer_types=["full_attention", "sliding_attention", "attention"], sliding_window=9).layers == 3

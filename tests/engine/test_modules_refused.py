"""What transformers' modules cannot be served with exactly is refused, naming the architecture and the reason."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import masking_utils

from engine.module_attention import LayerView, ModuleAttention, ModuleUnfit, mask
from engine.module_check import compare
from engine.weights import WeightsError
from models import ModelRef, UnsupportedModel
from tests.engine import tiny_models, tiny_modules

LAYER = SimpleNamespace(layer_idx=0)
ROWS = tuple(torch.zeros(1, 2, 3, 4) for _ in range(3))
SEES_ALL = torch.zeros((1, 1, 1, 1), dtype=torch.int64)


def folder_of(model_type: str, folder: Path, **changes: object) -> ModelRef:
    return tiny_models.save(tiny_modules.build(model_type, **changes), folder)


def config_of(ref: ModelRef, change: Callable[[dict[str, Any]], object]) -> None:
    """Change config.json."""
    file = ref.path / "config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def test_int8_weights(tmp_path: Path) -> None:
    ref = folder_of("gpt_neox", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"^weight_quantisation is 'int8'; gpt_neox is computed by transformers' modules"):
        tiny_models.load(ref, weight_quantisation="int8")


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("bloom", {"n_head": 6}, "its attention does not come through transformers' interface"),
        ("recurrent_gemma", {"num_key_value_heads": 1, "lru_width": 48}, "it keeps a state beside keys and values"),
        ("doge", {"num_key_value_heads": 2}, "it makes attention masks of its own"),
        ("bert", {}, "its attention mask is neither causal nor a sliding window"),
        ("roberta", {"is_decoder": True}, "it does not take the positions of its tokens from outside"),
        ("diffllama", {"num_key_value_heads": 2}, "layer 0 of its attention came after 1 others"),
        (
            "electra",
            {"is_decoder": True, "embedding_size": 48, "num_key_value_heads": 3},
            "6 query heads, 6 key heads of 8 elements",
        ),
    ],
)
def test_architectures(model_type: str, changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    ref = folder_of(model_type, tmp_path, **changes)
    # Some of them have their sizes under names of their own.
    config_of(ref, lambda values: values.update(tiny_modules.SHAPE | changes))
    with pytest.raises(UnsupportedModel, match=f"^{model_type} cannot be served: .*{reason}"):
        tiny_models.load(ref)


def test_code_that_comes_with_the_files(tmp_path: Path) -> None:
    ref = folder_of("gpt_neox", tmp_path)
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('the code of the folder ran')")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}}
    config_of(ref, lambda values: values.update(own))
    with pytest.raises(
        UnsupportedModel, match=r"own cannot be served: transformers \S+ has no code for it, and code that comes with"
    ):
        tiny_models.load(ref)


def test_an_architecture_without_a_decoder(tmp_path: Path) -> None:
    ref = folder_of("gpt_neox", tmp_path)
    config_of(ref, lambda values: values.update(model_type="distilbert"))
    with pytest.raises(UnsupportedModel, match="distilbert cannot be served: transformers has no decoder for text of it"):
        tiny_models.load(ref)


def test_the_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = folder_of("gpt_neox", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModel, match=r"gpt_neox is an architecture .* pip install 'tandem-serving\[transformers\]'"):
        tiny_models.load(ref)


def test_sizes_that_the_file_leaves_to_a_default_of_the_modules(tmp_path: Path) -> None:
    ref = folder_of("mixtral", tmp_path, num_attention_heads=16, num_key_value_heads=8, hidden_size=128)
    config_of(ref, lambda values: values.pop("num_key_value_heads"))
    with pytest.raises(UnsupportedModel, match=r"8 key heads of 8 elements .* its config.json says 16, 16 and 8 for all layers"):
        tiny_models.load(ref)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("gpt_neox.layers.1.mlp.dense_4h_to_h.bias"),
            "1 tensors are missing, among them gpt_neox.layers.1",
        ),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "1 tensors have no place in a gpt_neox decoder, among them more"),
    ],
)
def test_tensors(change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path) -> None:
    ref = folder_of("gpt_neox", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=message):
        tiny_models.load(ref)


def test_tensors_of_another_shape(tmp_path: Path) -> None:
    ref = folder_of("gpt_neox", tmp_path)
    config_of(ref, lambda values: values.update(intermediate_size=88))
    with pytest.raises(WeightsError, match="tensors have another shape than the configuration says, among them gpt_neox"):
        tiny_models.load(ref)


def test_too_few_pages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"total_pages is 2; .* the least is 3"):
        tiny_models.load(folder_of("gpt_neox", tmp_path), total_pages=2)


class Heard:
    """Implements Keeper: notes what a layer asks for."""

    def attend(self, layer: int, view: LayerView, query: torch.Tensor, *rest: object) -> torch.Tensor:
        self.asked = layer, view, tuple(query.shape)
        return query


def test_an_attention_call_says_how_a_layer_looks_back() -> None:
    heard = Heard()
    attention = ModuleAttention(heard)
    out, weights = attention(LAYER, *ROWS, SEES_ALL + 5, scaling=0.25, softcap=30.0, sliding_window=5, is_causal=True)
    assert (tuple(out.shape), weights) == ((1, 3, 2, 4), None)
    assert heard.asked == (0, LayerView(5, 0.25, 30.0), (3, 2, 4))
    attention(LAYER, *ROWS, SEES_ALL)
    assert heard.asked == (0, LayerView(None, 0.5, None), (3, 2, 4))


@pytest.mark.parametrize(
    ("module", "mark", "given", "reason"),
    [
        (LAYER, SEES_ALL, {"position_bias": torch.zeros(1)}, "its attention has position_bias"),
        (LAYER, SEES_ALL, {"is_causal": False}, "its attention is not causal"),
        (LAYER, SEES_ALL, {"dropout": 0.1}, "its attention drops weights"),
        (SimpleNamespace(), SEES_ALL, {}, "does not say which layer"),
        (LAYER, None, {}, "it makes attention masks of its own"),
        (LAYER, torch.zeros((1, 1, 3, 3)), {}, "it makes attention masks of its own"),
    ],
)
def test_attention_that_would_be_left_out(module: object, mark: torch.Tensor | None, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModuleUnfit, match=reason):
        ModuleAttention(Heard())(module, *ROWS, mark, **given)


def test_masks() -> None:
    """Those of transformers that look back, all or a window, and those that do something else."""
    assert int(mask(mask_function=masking_utils.causal_mask_function)) == 0
    for window in (1, 2, 9, 4096):
        looks = masking_utils.sliding_window_causal_mask_function(window)
        assert int(mask(mask_function=looks, local_size=window)) == window
    causal = masking_utils.causal_mask_function
    for other, window in [
        (masking_utils.bidirectional_mask_function, None),
        (masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), 8),
        (masking_utils.sliding_window_causal_mask_function(8), 9),
        (masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(torch.zeros(1, 2))), None),
    ]:
        with pytest.raises(ModuleUnfit, match="neither causal nor a sliding window"):
            mask(mask_function=other, local_size=window)
    with pytest.raises(ModuleUnfit, match="neither causal nor a sliding window"):
        mask(mask_function=causal, use_vmap=True)


def test_logits_that_differ() -> None:
    expected = torch.ones(5, 8)
    compare(expected + torch.tensor([0.0, 0.0, 0.0, 9.0, 9.0])[:, None], expected, torch.float32)
    with pytest.raises(ModuleUnfit, match=r"differ by 1.0e\+00, and 1e-04 is the limit"):
        compare(2 * expected, expected, torch.float32)
    with pytest.raises(ModuleUnfit, match=r"shape \[4, 8\] for \[5, 8\]"):
        compare(expected[1:], expected, torch.float32)
    with pytest.raises(ModuleUnfit, match="differ by nan"):
        compare(expected * float("nan"), expected, torch.bfloat16)

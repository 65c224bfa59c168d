"""Gemma 3 270M from its GGUF file, against transformers with the very same weights, in float32.

The reference dequantises with the gguf library and maps names and norms by a table of its own; only the file's header is read by
our reader, because the library's takes most of a minute for this vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from engine.batch import Batch, Rows
from engine.layout import pages_for
from engine.runner import ModelRunner
from models import ModelRef, TensorInfo, load_tokenizer, read_header
from tests.engine.tiny_models import greedy_with
from tests.gemma_files import gemma
from tests.reference import greedy

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
WINDOW, PAGE_TOKENS, OUTPUT_TOKENS = 512, 16, 6
TEXT = "The window of a layer is how far it looks back. A layer that sees everything stands between five that do not."
# fmt: off
TEXT_IDS = [818, 4771, 529, 496, 6352, 563, 1217, 2793, 625, 5724, 1063, 236761, 562, 6352, 600, 17149, 4326, 11979, 1534, 3493,
            600, 776, 711, 236761]
# fmt: on


def reference(ref: ModelRef) -> Gemma3ForCausalLM:
    """The sizes are those of the model's card; what they are in the file is for the engine to read."""
    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=WINDOW,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-6,
        attn_implementation="sdpa",
    )
    model = Gemma3ForCausalLM(config).eval()
    parameters = dict(model.named_parameters())
    data = np.memmap(ref.path, dtype=np.uint8, mode="r")
    with torch.no_grad():
        for gguf_name, info in read_header(ref.path).tensors.items():
            name = _name(gguf_name)
            # The converter adds the one that transformers adds when it runs.
            parameters.pop(name).copy_(torch.from_numpy(_values(data, info)) - float("norm" in name))
    assert not parameters, "the file lacks weights"
    return model


def _name(gguf_name: str) -> str:
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if gguf_name in whole:
        return whole[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _values(data: np.ndarray, info: TensorInfo) -> np.ndarray:
    kind = GGMLQuantizationType(info.kind)
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    size_bytes = math.prod(info.shape) // block_elements * block_bytes
    stored = data[info.offset_bytes : info.offset_bytes + size_bytes].reshape((*info.shape[:-1], -1))
    return np.array(dequantize(stored, kind), dtype=np.float32)


class Alone:
    """One sequence, whose pages go back as they leave the window."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.tables: tuple[list[int], ...] = tuple([] for _ in runner.layout.groups)
        self.free = [list(range(slab.units - 1, 0, -1)) for slab in runner.slabs]
        self.cached = 0

    def feed(self, ids: Sequence[int]) -> torch.Tensor:
        for group, table, free in zip(self.runner.layout.groups, self.tables, self.free, strict=True):
            gone = group.first_page(self.cached)
            free += [page for page in table[:gone] if page]
            table[:gone] = [0] * gone
            table += [free.pop() for _ in range(pages_for(self.cached + len(ids), group.page_tokens) - len(table))]
        rows = Rows("a", tuple(ids), self.cached, self.tables, True)
        self.cached += len(ids)
        return self.runner.run(Batch((rows,)))[0]

    def prompt(self, ids: Sequence[int], chunk: int = 160) -> torch.Tensor:
        """In chunks, so that pages of the prompt leave the window before its end is computed."""
        for start in range(0, len(ids), chunk):
            logits = self.feed(ids[start : start + chunk])
        return logits


@pytest.mark.slow
def test_its_tokenizer_is_sentencepiece_without_a_space_in_front() -> None:
    tokenizer = load_tokenizer(gemma())
    assert tokenizer.encode(TEXT) == [2, *TEXT_IDS]
    assert tokenizer.encode("Hello, world!") == [2, 9259, 236764, 1902, 236888]
    for text in ("Numbers: 1, 2, 3. Zoë, 東京.\n\n", " a space in front", "two  spaces"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == {1, 106}


@pytest.mark.slow
def test_greedy_tokens_of_prompts_shorter_and_longer_than_the_window() -> None:
    ref = gemma()
    prompts = [[2, *TEXT_IDS], [2, *TEXT_IDS * 22]]
    assert len(prompts[0]) < WINDOW < len(prompts[1]) == 529
    theirs = reference(ref)
    expected = [greedy(theirs, ids, OUTPUT_TOKENS) for ids in prompts]
    del theirs
    runner = ModelRunner.load(ref, dtype="float32", page_tokens=PAGE_TOKENS, total_pages=48, threads=1)
    assert [(group.layers, group.window) for group in runner.layout.groups] == [(3, None), (15, WINDOW)]
    for ids, tokens in zip(prompts, expected, strict=True):
        sequence = Alone(runner)
        assert greedy_with(sequence.prompt, ids, OUTPUT_TOKENS) == tokens
        gone = runner.layout.groups[1].first_page(sequence.cached - 1)
        assert sequence.tables[1][:gone] == [0] * gone and all(sequence.tables[0])
    assert gone, "no page has left the window"

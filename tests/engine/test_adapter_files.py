"""Folders of adapters: what is read, what is refused and by which words, and what an identity is made of."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.adapter_config import AdapterError, read_config
from engine.adapters import MAX_ADAPTERS, AdapterLimits, open_adapters, parse_adapters
from models import ModelRef
from tests.engine import tiny_models, tiny_modules
from tests.engine.adapter_files import Tiny, opened, write
from text.errors import UnsupportedModel

TINY = Tiny(1, rank=4, alpha=6.0, ranks={"layers.1.mlp.up_proj": 2}, alphas={"k_proj": 3})
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_models.build("llama")


def folder_of(tmp_path: Path, model: torch.nn.Module, **changes: object) -> Path:
    return write(tmp_path / "adapter", Tiny(1), model, **changes)


def refused(folder: Path, limits: AdapterLimits | None = None) -> str:
    with pytest.raises(AdapterError) as error:
        open_adapters({"mine": folder}, limits or AdapterLimits())
    message = str(error.value)
    assert message.startswith(f"adapter 'mine' in {folder}: ")
    return message


def test_rank_and_scale_of_each_module(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    fields = TINY.config() | {"target_modules": "all-linear", "layers_to_transform": 1, "init_lora_weights": "gaussian"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    found = read_config(folder, 64)
    assert len(found.modules) == 7 and found.has(1) and not found.has(0)
    names = ("model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj", "model.layers.0.self_attn.k_proj")
    assert [found.rank_of(name) for name in names] == [2, 4, 4]
    assert [found.scale_of(name) for name in names] == [3.0, 1.5, 0.75]
    assert replace(found, by_root_of_rank=True).scale_of(names[0]) == 6.0 / math.sqrt(2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora is True; only False is supported"),
        ({"bias": "all"}, "bias is 'all'; only 'none' is supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']; only None is supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA' is supported"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is [3]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base model"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules has embed_tokens; there are q_proj"),
        ({"target_modules": ".*proj"}, "target_modules is '.*proj'; it must be a list of modules, or 'all-linear'"),
        ({"target_modules": []}, "target_modules is []"),
        ({"r": 65}, "r is 65; it must be 1 to 64 (setting adapter_max_rank)"),
        ({"r": 0}, "r is 0; it must be 1 to 64"),
        ({"r": None}, "r is None"),
        ({"rank_pattern": {"q_proj": 100}}, "rank_pattern['q_proj'] is 100; it must be 1 to 64"),
        ({"rank_pattern": {".*q_proj": 3}}, "rank_pattern has '.*q_proj'; only names of modules"),
        ({"alpha_pattern": {"q_proj": "two"}}, "alpha_pattern['q_proj'] is 'two'; it must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; it must be a number"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'; it must be true or false"),
        ({"layers_to_transform": [-1]}, "layers_to_transform is [-1]"),
    ],
)
def test_a_field_that_is_not_supported_is_named(
    tmp_path: Path, model: torch.nn.Module, changes: dict[str, object], words: str
) -> None:
    assert f"adapter_config.json: {words}" in refused(folder_of(tmp_path, model, **changes))


def test_a_file_that_is_missing_broken_or_too_large_is_named(tmp_path: Path, model: torch.nn.Module) -> None:
    folder = folder_of(tmp_path, model)
    size = (folder / WEIGHTS).stat().st_size
    assert f"{WEIGHTS} has {size} bytes; the limit is {size - 1} (setting adapter_max_bytes)" in refused(
        folder, AdapterLimits(file_bytes=size - 1)
    )
    (folder / WEIGHTS).unlink()
    assert f"cannot read {WEIGHTS}: No such file" in refused(folder)
    (folder / "adapter_config.json").write_text("{")
    assert "adapter_config.json is no JSON" in refused(folder)
    (folder / "adapter_config.json").unlink()
    assert "cannot read adapter_config.json: No such file" in refused(folder)


def test_entries_have_a_name_and_a_folder() -> None:
    assert parse_adapters(["a=/x", "b.c-1=y=z"]) == {"a": Path("/x"), "b.c-1": Path("y=z")}
    for entry in ("a", "a=", "=x", "a b=x", ".a=x", "a" * 65 + "=x"):
        with pytest.raises(AdapterError, match="an entry is name=folder"):
            parse_adapters([entry])
    with pytest.raises(AdapterError, match="adapters has 'a' twice"):
        parse_adapters(["a=x", "a=y"])
    with pytest.raises(AdapterError, match=f"adapters has {MAX_ADAPTERS + 1} entries; the limit is {MAX_ADAPTERS}"):
        open_adapters({f"a{number}": Path() for number in range(MAX_ADAPTERS + 1)}, AdapterLimits())


def test_an_identity_is_of_what_an_adapter_computes(tmp_path: Path, model: torch.nn.Module) -> None:
    def identity(name: str, tiny: Tiny, **changes: object) -> str:
        return opened({"mine": write(tmp_path / name, tiny, model, **changes)})[0].identity

    first = identity("first", Tiny(1))
    assert len(first) == 32
    same = ({}, {"lora_dropout": 0.3, "base_model_name_or_path": "elsewhere", "target_modules": "all-linear"})
    assert {identity(f"same {number}", Tiny(1), **changes) for number, changes in enumerate(same)} == {first}
    others = (
        identity("weights", Tiny(2)),
        identity("alpha", Tiny(1), lora_alpha=9.0),
        identity("root", Tiny(1), use_rslora=True),
    )
    assert len({first, *others}) == 4


Change = Callable[[dict[str, torch.Tensor]], None]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _reshaped(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST] = tensors[FIRST][:, :-1].contiguous()


def _not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST][0, 0] = float("nan")


def _beyond(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 3)


def _missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[FIRST]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_reshaped, rf"tensor {FIRST} has shape \[4, 47\]; rank and model say \[4, 48\]"),
        (_not_finite, f"tensor {FIRST} has values that are no numbers"),
        (_beyond, "1 tensors that are no updates of target_modules: base_model.model.model.embed_tokens.lora_embedding_A"),
        (_missing, f"has no tensor {FIRST}, which target_modules asks for"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_named(tmp_path: Path, model: torch.nn.Module, change: Change, words: str) -> None:
    folder = folder_of(tmp_path, model)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    ref = tiny_models.save(model, tmp_path / "model")
    with pytest.raises(AdapterError, match=f"adapter 'mine': .*{words}"):
        tiny_models.load(ref, adapters=opened({"mine": folder}))


@pytest.mark.slow
def test_layers_that_the_model_has_not_are_named(tmp_path: Path, model: torch.nn.Module) -> None:
    folder = folder_of(tmp_path, model, layers_to_transform=[0, 99])
    with pytest.raises(AdapterError, match="adapter 'mine': layers_to_transform has 99; the model has layers 0 to"):
        tiny_models.load(tiny_models.save(model, tmp_path / "model"), adapters=opened({"mine": folder}))


@pytest.mark.slow
def test_models_that_no_adapter_can_change_refuse_it(tmp_path: Path, model: torch.nn.Module) -> None:
    adapters = opened({"mine": folder_of(tmp_path, model)})
    latent = tiny_models.save(tiny_models.build("deepseek-v3"), tmp_path / "latent")
    with pytest.raises(AdapterError, match=r"adapter 'mine': .* has attention over latent vectors"):
        tiny_models.load(latent, adapters=adapters)
    tiny_modules.build("gpt_neox").save_pretrained(tmp_path / "modules")
    with pytest.raises(UnsupportedModel, match=r"adapters has 'mine'; modules of transformers, which compute .* take none"):
        tiny_models.load(ModelRef("tiny", tmp_path / "modules", "safetensors", "0" * 64), adapters=adapters)

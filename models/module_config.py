"""The shape of a model that transformers' own modules compute: any decoder whose architecture the engine has no code for.

Only what pages, limits and routers need is read here. Whether the modules can be served is found where they are loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from models.config import check_sizes
from models.hf_fields import HfFields, ids_of, refuse_quantised
from text.errors import UnsupportedModel

# The names that configurations use for one thing, the usual one first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM = ("head_dim", "kv_channels")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_OTHER_PARTS = ("text_config", "vision_config", "audio_config")
_ATTENTION_KINDS = {"full_attention", "sliding_attention", "attention"}
# Scalings of rotary positions whose frequencies change, for all tokens, where the longest sequence of a step passes a length.
_SWITCHING_ROPES = {"longrope", "su"}


@dataclass(frozen=True, slots=True)
class ModuleConfig:
    """`architecture` is the model_type of config.json. All layers keep keys and values of kv_heads heads of head_dim elements.

    `vocabulary_size` is the number of logits. Ends of output: text.Tokenizer.eos_ids, which knows more than `eos_ids` here.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    context_tokens: int
    bos_id: int | None
    eos_ids: frozenset[int]

    def __post_init__(self) -> None:
        """Raises UnsupportedModel naming the field and the limit."""
        check_sizes(self, ("layers", "heads", "kv_heads", "head_dim", "vocabulary_size", "context_tokens"))


def module_config(fields: HfFields, more_eos: frozenset[int]) -> ModuleConfig:
    """From the values of config.json. `more_eos` are end ids that another file declares.

    Raises UnsupportedModel, naming the architecture and the reason, for what modules with attention over pages cannot serve, and
    where a size is missing.
    """
    architecture = fields.get("model_type")
    if not isinstance(architecture, str) or not architecture:
        raise UnsupportedModel(f"model_type in {fields.where} is {architecture!r:.60}; it must name the model's architecture.")
    _refuse_kinds(fields, architecture)
    refuse_quantised(fields)
    heads = _first(fields, _HEADS)
    one_head = fields.get("multi_query") is True
    return ModuleConfig(
        architecture=architecture,
        layers=_first(fields, _LAYERS),
        heads=heads,
        kv_heads=_first(fields, _KV_HEADS, 1 if one_head else heads),
        head_dim=_head_dim(fields, heads),
        vocabulary_size=fields.integer("vocab_size"),
        context_tokens=_context_tokens(fields),
        bos_id=next(iter(ids_of(fields.get("bos_token_id"))), None),
        eos_ids=ids_of(fields.get("eos_token_id")) | more_eos,
    )


def _refuse_kinds(fields: HfFields, architecture: str) -> None:
    if fields.flag("is_encoder_decoder", False):
        raise UnsupportedModel(f"{architecture} cannot be served: it has an encoder, and only decoders are served.")
    beside = [name for name in _OTHER_PARTS if fields.get(name) is not None]
    if beside:
        raise UnsupportedModel(
            f"{architecture} cannot be served: {beside[0]} in {fields.where} describes a part of it, and only models of text "
            "alone, with their sizes beside model_type, are served."
        )
    kinds = fields.get("layer_types")
    other = sorted({str(kind) for kind in kinds} - _ATTENTION_KINDS) if isinstance(kinds, list) else []
    if other:
        raise UnsupportedModel(
            f"{architecture} cannot be served: it has layers of kind {', '.join(other)}, and only layers whose attention sees "
            "all tokens or a sliding window of them are served."
        )


def _first(fields: HfFields, names: Sequence[str], default: int | None = None) -> int:
    """The integer under the first of the names that the file has."""
    for name in names:
        if fields.get(name) is not None:
            return fields.integer(name)
    if default is None:
        raise UnsupportedModel(
            f"{fields.get('model_type')} cannot be served: {fields.where} has no {names[0]}, nor {' or '.join(names[1:])}; only "
            "decoders whose layers have attention are served, and their sizes are read there."
        )
    return default


def _head_dim(fields: HfFields, heads: int) -> int:
    if fields.get("qk_rope_head_dim") is not None:
        # Attention over latent vectors, as modules compute it: with whole keys.
        return fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")
    if any(fields.get(name) is not None for name in _HEAD_DIM):
        return _first(fields, _HEAD_DIM)
    if heads < 1:
        raise UnsupportedModel(f"The model's heads is {heads}; it must be at least 1.")
    return _first(fields, _HIDDEN) // heads


def _context_tokens(fields: HfFields) -> int:
    """Tokens of the context. Less than the file says where rotary frequencies would change for the sequences of a whole step,
    whose cached keys were made with others."""
    bounds = [_first(fields, _CONTEXT)]
    for settings in _ropes(fields.get("rope_parameters") or fields.get("rope_scaling")):
        if settings.get("rope_type", settings.get("type")) in _SWITCHING_ROPES:
            rope = HfFields(settings, f"the rope settings of {fields.where}")
            stated = fields.get("original_max_position_embeddings")
            bounds.append(rope.integer("original_max_position_embeddings", stated if isinstance(stated, int) else None))
    return min(bounds)


def _ropes(settings: object) -> Iterator[Mapping[str, object]]:
    """Rotary settings: one object for all layers, or one for each kind of layer."""
    if isinstance(settings, dict):
        yield settings
        yield from (each for each in settings.values() if isinstance(each, dict))

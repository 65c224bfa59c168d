"""The draft model that a member's settings ask for, and whether it fits the model that it drafts for."""

from dataclasses import dataclass

import models
from decode_svc.config import DecodeSettings
from decode_svc.draft_model import ModelDrafts
from decode_svc.opening import Tokenizer
from engine.runner import ModelRunner, Runner


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that is loaded to draft, with its tokenizer and its name."""

    name: str
    runner: Runner
    tokenizer: Tokenizer


def load_draft_model(settings: DecodeSettings) -> DraftModel | None:
    """Weights and KV memory, as for the model itself; None where the settings name none. Takes seconds.

    Raises what ModelRunner.load raises, and models.ModelNotFound.
    """
    if not settings.draft_model:
        return None
    ref = models.resolve(settings.draft_model)
    runner = ModelRunner.load(
        ref,
        dtype=settings.dtype,
        weight_quantisation=settings.weight_quantisation,
        page_tokens=settings.page_tokens,
        total_pages=settings.draft_pages,
        threads=settings.engine_threads,
        backend=settings.backend,
    )
    return DraftModel(ref.name, runner, models.load_tokenizer(ref))


def drafts_for(
    draft: DraftModel | None, model: str, runner: Runner, tokenizer: Tokenizer, step_tokens: int
) -> ModelDrafts | None:
    """Drafts for `model`, which has this runner and this tokenizer. step_tokens: as in ModelDrafts.

    Raises ValueError, naming both models, when their ids do not mean the same.
    """
    if draft is None:
        return None
    sizes = (draft.tokenizer.vocabulary_size, tokenizer.vocabulary_size)
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft_model {draft.name} has a vocabulary of {sizes[0]} ids, model {model} one of {sizes[1]}; they must be the same"
        )
    unlike = next((token for token in range(sizes[0]) if draft.tokenizer.piece(token) != tokenizer.piece(token)), None)
    if unlike is not None:
        raise ValueError(
            f"draft_model {draft.name} has another vocabulary than model {model}: id {unlike} is "
            f"{draft.tokenizer.piece(unlike)!r} there and {tokenizer.piece(unlike)!r} here"
        )
    return ModelDrafts(draft.runner, runner.vocabulary_size, step_tokens)

"""What a sequence is told when it is made, as checked values. Pure."""

from dataclasses import dataclass, field

from engine.grammar_library import CompiledGrammar
from engine.log_probs import TokenLogProb
from engine.sampling_params import SamplingParams
from lifecycle.record import AttemptKey
from text.detokeniser import Utf8Policy
from text.stop_matcher import StopRules


@dataclass(frozen=True, slots=True)
class StopSpec:
    """What ends an output.

    rules: the stop texts, compiled, with whether a matched one is shown. token_ids: the request's own ids that end the
    output. eos_ids: every end token of the model; with ignore_eos they are tokens like any other, unless token_ids
    names them. min_output_tokens: until that many tokens were chosen nothing of this ends the output.

    With a grammar, ids that show nothing can be chosen only where the text is whole. min_output_tokens holds the end back as
    long as the grammar allows more text: a grammar that is complete ends the output all the same.
    """

    rules: StopRules = field(default_factory=lambda: StopRules(()))
    token_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_output_tokens: int = 0

    def __post_init__(self) -> None:
        if self.min_output_tokens < 0:
            raise ValueError(f"min_output_tokens is {self.min_output_tokens}, must be at least 0")

    @property
    def ending_ids(self) -> frozenset[int]:
        """Ids that end the output and are not shown."""
        return self.token_ids if self.ignore_eos else self.token_ids | self.eos_ids


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier attempts at the same output came to; this one goes on after it.

    token_ids: all tokens that they chose, in order. text_bytes: how much of the text of these tokens was delivered, and
    returned_tokens: how many of them were shown with it. What they bring out beyond that is still to be shown.
    held_log_probs: of the tokens that were not shown, as they were told, when the request wants any.
    """

    token_ids: tuple[int, ...] = ()
    text_bytes: int = 0
    returned_tokens: int = 0
    held_log_probs: tuple[TokenLogProb, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One output of one attempt.

    index: which of the request's outputs, from 0. max_output_tokens: at least 1, those of earlier attempts included.
    context_tokens: the model's limit; the prompt fits into it. utf8_policy None: bytes that are no character are an
    error, unless a limit, a cancel or a failure cut the output inside one. log_probs: for how many most likely tokens
    log-probabilities are told beside each chosen one's own; None tells none. scores_prompt: with log_probs, those of the prompt's
    tokens are told too, so all of it is computed with its logits. grammar: what the text must be. adapter: name of the one that
    computes it; empty: the base model.
    """

    key: AttemptKey
    index: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopSpec
    max_output_tokens: int
    context_tokens: int
    utf8_policy: Utf8Policy | None = None
    earlier: Earlier = field(default_factory=Earlier)
    grammar: CompiledGrammar | None = None
    log_probs: int | None = None
    scores_prompt: bool = False
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ValueError(f"index is {self.index}, must be at least 0")
        if self.max_output_tokens < 1:
            raise ValueError(f"max_output_tokens is {self.max_output_tokens}, must be at least 1")
        if not 1 <= len(self.prompt_token_ids) <= self.context_tokens:
            length = len(self.prompt_token_ids)
            raise ValueError(f"prompt_token_ids has {length} ids, must have 1 to context_tokens, which is {self.context_tokens}")

    @property
    def most_cache_tokens(self) -> int:
        """Most tokens whose KV this sequence can ever need: the prompt and all of the output but its last token."""
        prompt = len(self.prompt_token_ids)
        return max(prompt, min(prompt + self.max_output_tokens, self.context_tokens) - 1)

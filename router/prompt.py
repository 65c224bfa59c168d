"""Turning a prompt into tokens: chat template first, long texts off the event loop, everything bounded."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from router.request import Prompt
from rpc.details import Quota, Violation
from rpc.status import invalid_argument, resource_exhausted
from text.chat_template import Message
from text.errors import ChatTemplateError
from text.tokenizer import Tokenizer

#: Texts up to this many characters are tokenised on the event loop (well under a millisecond).
INLINE_CHARACTERS = 4096


class PromptEncoder:
    """Tokenises prompts with `threads` threads and at most `waiting` prompts that wait for one or are in work."""

    def __init__(self, tokenizer: Tokenizer, *, threads: int = 2, waiting: int = 64) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")
        self._most = waiting
        self._open = 0

    @property
    def busy(self) -> int:
        """Long prompts waiting or in work."""
        return self._open

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of `prompt`. Raises StatusError: INVALID_ARGUMENT when the template refuses the conversation,
        RESOURCE_EXHAUSTED when too many long prompts wait."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.size <= INLINE_CHARACTERS:
            return self._encode(prompt)
        if self._open >= self._most:
            raise resource_exhausted(
                f"{self._open} long prompts are being tokenised; at most {self._most} may wait",
                "TOKENISER_BUSY",
                retry_after_s=1.0,
                quotas=[Quota("router", "long prompts being tokenised", "prompts", "tokenise_waiting", self._most)],
            )
        loop = asyncio.get_running_loop()
        work = self._pool.submit(self._encode, prompt)
        self._open += 1
        # A client that leaves stops waiting, but the thread works on: what counts is the end of the work.
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Stops the threads; what is in work is finished and forgotten."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self) -> None:
        self._open -= 1

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.text is not None:
            return tuple(self._tokenizer.encode(prompt.text))
        template = self._tokenizer.chat
        if template is None:
            description = "this model has no chat template; send text or tokens"
            raise invalid_argument([Violation("chat", description, "NO_CHAT_TEMPLATE")])
        try:
            rendered = template.render([Message(turn.role, turn.content) for turn in prompt.chat or ()])
        except ChatTemplateError as error:
            raise invalid_argument([Violation(prompt.field, f"the chat template refuses it: {error}", "BAD_CHAT")]) from None
        return tuple(self._tokenizer.encode_plain(rendered))

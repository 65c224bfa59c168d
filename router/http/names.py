"""The router's names of fields as HTTP clients know them, in errors. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from router.http.errors import HttpError, from_status
from rpc.details import Resource
from rpc.status import StatusError

#: Names that are the same for all bodies.
_ALWAYS = {
    "output_mode OUTPUT_MODE_FINAL_ONLY": "stream false",
    "output_mode": "stream",
    "request_id": "X-Request-Id",
    "stop.sequences": "stop",
    "stop.token_ids": "stop_token_ids",
    "stop.min_output_tokens": "min_tokens",
    "log_probabilities.prompt": "echo",
    "adapter": "model",
}
#: Fields that one reason is about, where the status does not name one.
_REASON_PARAMS = {
    "IDEMPOTENCY_KEY_REUSED": "X-Request-Id",
    "REPLAY_GONE": "X-Request-Id",
    "UNKNOWN_MODEL": "model",
    "ADAPTER_MISMATCH": "model",
}


@dataclass(frozen=True, slots=True)
class Names:
    """`own`: the router's names (with dots) of what the bodies of this kind call otherwise, each with the client's name.

    served: name of the cell's model.
    """

    own: Mapping[str, str]
    served: str = ""

    def of(self, path: str) -> str:
        """The client's name of a field, such as messages[2].role for chat.messages[2].role."""
        known = {**_ALWAYS, **self.own}
        for name in sorted(known, key=len, reverse=True):
            if path == name or (path.startswith(name) and path[len(name)] in ".["):
                return known[name] + path[len(name) :]
        return path.removeprefix("sampling.")

    def in_words(self, sentence: str) -> str:
        """The sentence with the client's names. Those of one plain word are left: they may be meant as words."""
        for name, theirs in sorted({**self.own, **_ALWAYS}.items(), key=lambda pair: -len(pair[0])):
            if not name.isalpha():
                sentence = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", theirs, sentence)
        return sentence.replace("at least choices,", "at least n,").replace("more than choices,", "more than n,")

    def error(self, status: StatusError) -> HttpError:
        """A refusal of the router as this client is told it."""
        told, violations = from_status(status), status.details.violations
        pairs = [(self.of(one.field), self.in_words(one.description)) for one in violations]
        if pairs:
            message = "; ".join(f"{field}: {words}" if field else words for field, words in pairs)
            return HttpError(told.status, message, told.code, pairs[0][0] or None, retry_after_s=told.retry_after_s)
        if told.code == "UNKNOWN_ADAPTER" and status.details.resource is not None:
            return self._unknown_model(status.details.resource)
        param = _REASON_PARAMS.get(told.code)
        return HttpError(told.status, self.in_words(told.message), told.code, param, retry_after_s=told.retry_after_s)

    def _unknown_model(self, asked: Resource) -> HttpError:
        """Adapters are models here: a name that is no adapter's is nobody's."""
        adapters = asked.description.removeprefix("this cell has ")
        words = f"no model is called {asked.name!r}; this cell serves {self.served!r} (adapters: {adapters})"
        return HttpError(404, words, "UNKNOWN_MODEL", "model")

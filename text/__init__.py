"""Text in and out: tokenizers, chat templates, detokenising, stops. No torch."""

from text.chat_template import ChatTemplate, Message
from text.detokeniser import Detokeniser, LeadingSpace, TextStream, TokenBytes, Utf8Policy
from text.errors import BadUtf8, ChatTemplateError, InvalidStops, UnsupportedModel
from text.gguf_tokenizer import from_gguf
from text.stop_matcher import (
    MAX_STOP_BYTES,
    MAX_STOPS,
    STOP_RULE_VERSION,
    Matched,
    StopMatcher,
    StopRules,
    TokenStopMatcher,
    TokenStopRules,
)
from text.tokenizer import Tokenizer, from_hf_directory

__all__ = [
    "MAX_STOPS",
    "MAX_STOP_BYTES",
    "STOP_RULE_VERSION",
    "BadUtf8",
    "ChatTemplate",
    "ChatTemplateError",
    "Detokeniser",
    "InvalidStops",
    "LeadingSpace",
    "Matched",
    "Message",
    "StopMatcher",
    "StopRules",
    "TextStream",
    "TokenBytes",
    "TokenStopMatcher",
    "TokenStopRules",
    "Tokenizer",
    "UnsupportedModel",
    "Utf8Policy",
    "from_gguf",
    "from_hf_directory",
]

"""From text to token ids and back: tokenizers, chat templates, detokeniser, stop matcher. No torch."""

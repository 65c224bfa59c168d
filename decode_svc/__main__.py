"""`python -m decode_svc`: one decode member."""

import sys

import models
from decode_svc.config import DecodeSettings
from decode_svc.service import DecodeService, Parts
from engine.runner import ModelRunner
from kv_transfer.nixl import NixlReceiver
from member.process import run_member
from member.transport import prepare_or_exit
from rpc.application import Frame
from rpc.settings import load_or_exit
from text.tokenizer import Tokenizer

PROG = "python -m decode_svc"


def main() -> int:
    """Runs until a signal; returns the exit code."""
    settings = load_or_exit(DecodeSettings, prog=PROG, description="A decode member of Tandem.")
    prepare_or_exit(settings, PROG)

    def build(frame: Frame) -> DecodeService:
        ref = models.resolve(settings.model)

        def load_runner() -> ModelRunner:
            return ModelRunner.load(
                ref,
                dtype=settings.dtype,
                page_tokens=settings.page_tokens,
                total_pages=settings.total_pages,
                threads=settings.engine_threads,
                backend=settings.backend,
            )

        def load_tokenizer() -> Tokenizer:
            return models.load_tokenizer(ref)

        return DecodeService(frame, settings, Parts(load_runner, load_tokenizer, NixlReceiver, ref.name))

    return run_member(build, settings, "decode")


if __name__ == "__main__":
    sys.exit(main())

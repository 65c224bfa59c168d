"""`python -m decode_svc`: one decode member."""

import sys
from functools import partial

import models
from decode_svc.config import DecodeSettings
from decode_svc.draft_loading import load_draft_model
from decode_svc.service import DecodeService, Parts
from kv_transfer.nixl import NixlReceiver
from member.loading import load_runner
from member.process import run_member
from member.transport import prepare_or_exit
from rpc.application import Frame
from rpc.settings import load_or_exit

PROG = "python -m decode_svc"


def main() -> int:
    """Runs until a signal; returns the exit code."""
    settings = load_or_exit(DecodeSettings, prog=PROG, description="A decode member of Tandem.")
    prepare_or_exit(settings, PROG)

    def build(frame: Frame) -> DecodeService:
        ref = models.resolve(settings.model)
        parts = Parts(
            partial(load_runner, settings, ref, frame.name),
            partial(models.load_tokenizer, ref),
            NixlReceiver,
            ref.name,
            load_draft_model=partial(load_draft_model, settings),
        )
        return DecodeService(frame, settings, parts)

    return run_member(build, settings, "decode")


if __name__ == "__main__":
    sys.exit(main())

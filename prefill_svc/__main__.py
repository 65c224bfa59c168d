"""`python -m prefill_svc`: one prefill member."""

import sys
from functools import partial

import models
from kv_transfer.nixl import NixlSender
from member.loading import load_runner
from member.process import run_member
from member.transport import prepare_or_exit
from prefill_svc.config import PrefillSettings
from prefill_svc.service import Parts, PrefillService
from rpc.application import Frame
from rpc.settings import load_or_exit

PROG = "python -m prefill_svc"


def main() -> int:
    """Runs until a signal; returns the exit code."""
    settings = load_or_exit(PrefillSettings, prog=PROG, description="A prefill member of Tandem.")
    prepare_or_exit(settings, PROG)

    def build(frame: Frame) -> PrefillService:
        ref = models.resolve(settings.model)
        return PrefillService(frame, settings, Parts(partial(load_runner, settings, ref, frame.name), NixlSender, ref.name))

    return run_member(build, settings, "prefill")


if __name__ == "__main__":
    sys.exit(main())

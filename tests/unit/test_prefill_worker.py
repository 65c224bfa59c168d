"""The turns of a prefill member's engine thread, with a model that computes nothing."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from engine.batch import Batch, LayerMarks
from engine.landing import LandingRows
from kv_transfer.grant_writer import Transfers
from member.inbox import Inbox
from prefill_svc import messages as m
from prefill_svc.worker import PrefillWorker, WorkerPorts
from tests.unit.test_prefill_scheduler import GROUP, LIMITS, ROW_BYTES, scheduler, submit

VOCABULARY = ROW_BYTES // 4


class Model:
    """`meanwhile` is called while a step runs."""

    layout = SimpleNamespace(groups=(GROUP,))

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None

    def run(self, batch: Batch, marks: LayerMarks | None = None) -> torch.Tensor:
        self.meanwhile()
        return torch.zeros(sum(rows.wants_logits for rows in batch.rows), VOCABULARY)

    def rest(self) -> None:
        pass


def test_a_drain_that_comes_while_a_step_runs_is_answered_at_its_end() -> None:
    """Else more would be written for nobody, and the answer wait for the end of those writes and of another prompt's step."""
    model, inbox, target = Model(), Inbox[m.Command](16), scheduler()
    told: list[m.Output] = []
    sent: list[Transfers] = []
    ports = WorkerPorts(sent.append, lambda outputs, *_: told.extend(outputs), lambda _: None)
    worker = PrefillWorker(model, LandingRows(LIMITS.staging_rows, VOCABULARY), target, inbox, ports)  # type: ignore[arg-type]
    for number in (1, 2):
        inbox.put_nowait(submit(number, LIMITS.step_tokens))
    model.meanwhile = lambda: inbox.put_always(m.Drain(f"{1:032x}", 7))
    assert worker.turn()
    assert m.Drained(7, committed=False) in told
    assert [(one.grant_id, one.cause) for one in told if isinstance(one, m.Failed)] == [(f"{1:032x}", m.REVOKED)]
    assert not any(transfers.pushes for transfers in sent) and target.check() == []
    model.meanwhile = lambda: None
    assert worker.turn()
    assert {push.agent for transfers in sent for push in transfers.pushes} == {"agent"}, "the other prompt goes its way"
    assert target.statistics().sending_jobs == 1 and target.check() == []

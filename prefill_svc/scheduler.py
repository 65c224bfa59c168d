"""Which prompts are computed next, which parts are sent, and when everything they held is given back. Pure.

A job takes all pages of its prompt when its first chunk is planned, all or nothing, so jobs that hold pages can always go on.
Jobs that hold pages go before jobs that do not.
"""

from bisect import insort
from collections import Counter
from collections.abc import Sequence

from engine.batch import Batch, Rows
from engine.layout import pages_for
from engine.pages import PagePool
from kv_transfer.grants import AnswerNow, Draining, DuplicateGrant, Filled, GrantRevoked, GrantsFull, WriterBook, WriterOutcome
from kv_transfer.grants import Drained as GrantDrained
from kv_transfer.offer import Endpoint
from kv_transfer.plan import PagePart
from kv_transfer.ports import Push
from prefill_svc import messages as m
from prefill_svc.job import Job, Phase
from prefill_svc.plans import Chunk, SchedulerLimits, SchedulerStatistics, StepPlan, Transfers


class PrefillScheduler:
    """Jobs of one member. `now` is monotonic seconds throughout."""

    def __init__(self, limits: SchedulerLimits, pools: Sequence[PagePool], page_tokens: Sequence[int], book: WriterBook) -> None:
        self.limits = limits
        self._pools = tuple(pools)
        self._page_tokens = tuple(page_tokens)
        self._book = book
        self._jobs: dict[str, Job] = {}
        self._waiting: list[tuple[tuple[int, int], Job]] = []
        self._computing: list[Job] = []
        self._free_rows = list(range(limits.staging_rows - 1, -1, -1))
        self._flights: dict[int, tuple[str, int, int]] = {}  # grant, part, bytes
        self._pushed_bytes = 0
        self._askers: dict[str, list[int]] = {}
        self._numbers = 0
        self._push_ids = 0
        self._closed = False
        self._outputs: list[m.Output] = []
        self._pushes: list[Push] = []
        self._connects: list[Endpoint] = []
        self._withdrawals: list[int] = []
        self.ended: Counter[str] = Counter()

    # ---- commands

    def accept(self, commands: Sequence[m.Command], now: float) -> None:
        """Take in what the other actors say, in order."""
        for outcome in self._book.heard(now):
            self._settle(outcome, now)
        for command in commands:
            match command:
                case m.Submit():
                    self._submit(command, now)
                case m.Abandon():
                    self._give_up(command.grant_id, m.ABANDONED, now)
                case m.Drain():
                    self._drain(command, now)
                case m.Pushed():
                    self._pushed(command, now)
                case m.Close():
                    self._close(command, now)
                case m.Recount():
                    self._outputs.append(m.Recounted(command.asker, self.books(), tuple(self.check())))

    def _submit(self, submit: m.Submit, now: float) -> None:
        refusal = self._refusal(submit)
        if refusal is None:
            try:
                self._book.accept(submit.plan.grant, now)
            except GrantRevoked as error:
                refusal = (m.REVOKED, str(error))
            except (GrantsFull, DuplicateGrant) as error:
                refusal = (m.QUEUE_FULL if isinstance(error, GrantsFull) else m.BAD_GRANT, str(error))
        if refusal is not None:
            self.ended[refusal[0]] += 1
            self._outputs.append(m.Failed(submit.grant_id, *refusal))
            return
        self._connects.append(submit.plan.grant.endpoint)
        self._outputs.append(m.Accepted(submit.grant_id, self._waiting_tokens()))
        job = Job(submit, now, self._numbers)
        self._numbers += 1
        self._jobs[job.grant_id] = job
        insort(self._waiting, (job.rank, job), key=lambda entry: entry[0])

    def _refusal(self, submit: m.Submit) -> tuple[str, str] | None:
        limits, tokens = self.limits, len(submit.prompt_token_ids)
        if self._closed:
            return m.DRAINING, "this member is shutting down"
        if submit.plan.grant.token_count != tokens:
            return m.BAD_GRANT, f"grant.token_count is {submit.plan.grant.token_count} and the prompt has {tokens} tokens"
        if tokens > limits.context_tokens:
            return m.TOO_LONG, f"prompt_token_ids has {tokens} tokens; the limit is the context of {limits.context_tokens}"
        for pool, size in zip(self._pools, self._page_tokens, strict=True):
            if pages_for(tokens, size) > pool.usable_pages:
                return m.TOO_LONG, f"the prompt needs {pages_for(tokens, size)} pages; this member has {pool.usable_pages}"
        if len(self._jobs) >= limits.max_jobs:
            return m.QUEUE_FULL, f"{limits.max_jobs} jobs (max_jobs) are here already"
        if self._jobs and self._waiting_tokens() + tokens > limits.max_queued_tokens:
            return m.QUEUE_FULL, f"more than {limits.max_queued_tokens} prompt tokens (max_queued_tokens) would wait"
        return None

    def _drain(self, drain: m.Drain, now: float) -> None:
        answer = self._book.drain(drain.grant_id)
        if isinstance(answer, AnswerNow):
            self._outputs.append(m.Drained(drain.asker, answer.committed))
            self._ended(drain.grant_id, answer.cause, now)
            return
        self._askers.setdefault(drain.grant_id, []).append(drain.asker)
        self._stop_computing(drain.grant_id)

    def _close(self, close: m.Close, now: float) -> None:
        self._closed = True
        if close.expel:
            for grant_id in list(self._jobs):
                self._give_up(grant_id, m.DRAINING, now)

    # ---- planning

    def next_batch(self, now: float) -> StepPlan | None:
        """The next step within the budgets of tokens and sequences; None when nothing can run."""
        self._expire(now)
        budget, rows, chunks = self.limits.step_tokens, list[Rows](), list[Chunk]()
        blocked: list[Job] = []
        for job in [*self._computing, *self._startable()]:
            if budget == 0 or len(chunks) == self.limits.step_sequences:
                break
            if job.phase is Phase.WAITING and not self._start(job, blocked, now):
                blocked.append(job)
                continue
            tokens = min(budget, job.left_tokens)
            last = tokens == job.left_tokens
            if last and not self._take_row(job):
                tokens, last = tokens - 1, False
            if tokens == 0:
                continue
            budget -= tokens
            ids = job.submit.prompt_token_ids[job.computed_tokens : job.computed_tokens + tokens]
            rows.append(Rows(job.grant_id, ids, job.computed_tokens, job.pages, last))
            chunks.append(Chunk(job.grant_id, tokens, job.staging_row if last else None))
        return StepPlan(Batch(tuple(rows)), tuple(chunks)) if chunks else None

    def _startable(self) -> list[Job]:
        """Waiting jobs in order, as many as one step can look at."""
        return [job for _, job in self._waiting[: self.limits.step_sequences + self.limits.max_pass_over]]

    def _start(self, job: Job, blocked: Sequence[Job], now: float) -> bool:
        """Give a waiting job its pages; False when they are not there. Jobs in `blocked` are passed over by it."""
        wanted = [pages_for(job.tokens, size) for size in self._page_tokens]
        if any(pool.free_pages < count for pool, count in zip(self._pools, wanted, strict=True)):
            return False
        if any(other.passed_over >= self.limits.max_pass_over for other in blocked):
            return False
        for other in blocked:
            other.passed_over += 1
        job.pages = tuple(tuple(pool.allocate(job.grant_id, count)) for pool, count in zip(self._pools, wanted, strict=True))
        self._book.begin(job.grant_id, len(job.submit.plan.parts))
        self._waiting.remove((job.rank, job))
        self._computing.append(job)
        job.phase, job.started_at, job.last_chunk_at = Phase.COMPUTING, now, now
        return True

    def _take_row(self, job: Job) -> bool:
        if not self._free_rows:
            return False
        job.staging_row = self._free_rows.pop()
        return True

    def _expire(self, now: float) -> None:
        for job in [job for job in self._jobs.values() if job.phase in (Phase.WAITING, Phase.COMPUTING) and job.expired(now)]:
            self._give_up(job.grant_id, m.DEADLINE, now)

    def next_wake(self, now: float) -> float | None:
        """When something is due although nothing happens: the first clock that runs out."""
        waiting = (job for job in self._jobs.values() if job.phase in (Phase.WAITING, Phase.COMPUTING))
        return min(
            (job.arrived_at + job.submit.remaining_s for job in waiting if job.submit.remaining_s is not None), default=None
        )

    # ---- results of a step

    def commit(self, plan: StepPlan, now: float) -> None:
        """The step has run and last logits lie in their staging rows: note progress, send the parts that are complete."""
        for chunk in plan.chunks:
            job = self._jobs[chunk.grant_id]
            job.computed_tokens += chunk.tokens
            job.last_chunk_at = now
            if job.left_tokens == 0:
                self._computing.remove(job)
                job.phase = Phase.SENDING
            self._outputs.append(m.Progress(job.grant_id, job.computed_tokens, now))
            self._send_ready(job, now)

    def fail_step(self, plan: StepPlan, detail: str, now: float) -> None:
        """The step could not be computed: its jobs end, the others go on."""
        for chunk in plan.chunks:
            self._jobs[chunk.grant_id].detail = detail
            self._give_up(chunk.grant_id, m.MODEL_ERROR, now)

    def _send_ready(self, job: Job, now: float) -> None:
        ready = job.submit.plan.ready_parts(job.computed_tokens)
        while job.posted_parts < ready and self._book.may_post(job.grant_id, now):
            part = job.posted_parts
            push_id = self._push_ids
            self._push_ids += 1
            push = job.submit.plan.push(push_id, part, job.pages, job.staging_row or 0)
            self._pushes.append(push)
            self._book.posted(job.grant_id, part)
            self._flights[push_id] = (job.grant_id, part, push.size_bytes)
            self._pin(job, push_id)
            job.posted_parts += 1
            job.first_post_at = now if job.first_post_at is None else job.first_post_at

    def _pin(self, job: Job, push_id: int) -> None:
        """The pages of this part cannot be reused while the write reads them, whatever becomes of the job."""
        job.pins.add(push_id)
        part = job.submit.plan.parts[job.posted_parts]
        if isinstance(part, PagePart):
            table = job.pages[part.group]
            self._pools[part.group].pin(str(push_id), [table[number] for number in part.page_numbers])

    def _pushed(self, pushed: m.Pushed, now: float) -> None:
        for result in pushed.results:
            grant_id, part, size_bytes = self._flights.pop(result.push_id)
            self._pushed_bytes += size_bytes if result.ok else 0
            job = self._jobs[grant_id]
            job.pins.discard(result.push_id)
            part_sent = job.submit.plan.parts[part]
            if isinstance(part_sent, PagePart):
                self._pools[part_sent.group].unpin(str(result.push_id))
            job.last_done_at = max(job.last_done_at, pushed.done_at)
            job.post_s += pushed.post_s / len(pushed.results)
            if not result.ok and not job.detail:
                job.detail = f"{result.cause}: {result.detail}"
            self._settle(self._book.finished(grant_id, part, None if result.ok else m.TRANSFER_FAILED), now)

    # ---- endings

    def _settle(self, outcome: WriterOutcome, now: float) -> None:
        if isinstance(outcome, Filled):
            job = self._jobs[outcome.grant_id]
            self._release(job)
            self.ended["committed"] += 1
            self._outputs.append(m.Committed(job.grant_id, job.figures()))
        elif isinstance(outcome, GrantDrained):
            for asker in self._askers.pop(outcome.grant_id, ()):
                self._outputs.append(m.Drained(asker, committed=False))
            self._ended(outcome.grant_id, outcome.cause, now)
        elif isinstance(outcome, Draining):
            self._stop_computing(outcome.grant_id)

    def _give_up(self, grant_id: str, cause: str, now: float) -> None:
        """Stop a job: at once when nothing is in flight, else when its last write has ended."""
        outcome = self._book.fail(grant_id, cause)
        if outcome is not None:
            self._settle(outcome, now)
            self._stop_computing(grant_id)

    def _stop_computing(self, grant_id: str) -> None:
        job = self._jobs.get(grant_id)
        if job is None:
            return
        if job.phase is Phase.WAITING:
            self._waiting.remove((job.rank, job))
        elif job.phase is Phase.COMPUTING:
            self._computing.remove(job)
        job.phase = Phase.STOPPING
        self._withdrawals += job.pins

    def _ended(self, grant_id: str, cause: str, now: float) -> None:
        job = self._jobs.get(grant_id)
        if job is None:
            return
        self._stop_computing(grant_id)
        self._release(job)
        self.ended[cause] += 1
        self._outputs.append(m.Failed(grant_id, cause, job.detail or f"the hand-over stopped: {cause}"))

    def _release(self, job: Job) -> None:
        """The one place where a job gives back what it holds."""
        del self._jobs[job.grant_id]
        if job.pages:
            for pool in self._pools:
                pool.release(job.grant_id)
        if job.staging_row is not None:
            self._free_rows.append(job.staging_row)

    # ---- what others see

    def take_outputs(self) -> list[m.Output]:
        """Everything to tell since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_transfers(self) -> Transfers:
        """What the transfer thread is to do since the last call."""
        transfers = Transfers(tuple(self._connects), tuple(self._pushes), tuple(self._withdrawals))
        self._connects, self._pushes, self._withdrawals = [], [], []
        return transfers

    def _waiting_tokens(self) -> int:
        return sum(job.left_tokens for job in self._jobs.values() if job.phase is not Phase.STOPPING)

    def statistics(self) -> SchedulerStatistics:
        """Gauges at this moment."""
        phases = Counter(job.phase for job in self._jobs.values())
        return SchedulerStatistics(
            waiting_jobs=phases[Phase.WAITING],
            computing_jobs=phases[Phase.COMPUTING],
            sending_jobs=phases[Phase.SENDING],
            stopping_jobs=phases[Phase.STOPPING],
            waiting_tokens=self._waiting_tokens(),
            free_pages=min(pool.free_pages for pool in self._pools),
            staging_rows_used=self.limits.staging_rows - len(self._free_rows),
            pushes_in_flight=len(self._flights),
            pages=self._pools[0].counts(),
            pushed_bytes=self._pushed_bytes,
        )

    def books(self) -> dict[str, int]:
        """What is held, by name, for a recount."""
        now, counts = self.statistics(), [pool.counts() for pool in self._pools]
        states = ("total", "free", "owned", "cached", "granted", "quarantined", "pinned")
        pages = {f"pages_{state}": sum(getattr(count, state) for count in counts) for state in states}
        grants = self._book.statistics()
        return {
            **pages,
            "jobs": now.jobs,
            "waiting_tokens": now.waiting_tokens,
            "staging_rows_used": now.staging_rows_used,
            "pushes_in_flight": now.pushes_in_flight,
            "grants_open": grants.accepted + grants.writing + grants.draining,
            "drains_waiting": sum(len(askers) for askers in self._askers.values()),
        }

    def check(self) -> list[str]:
        """Sentences about anything that does not add up; empty when all is well."""
        faults = [*self._book.check(), *(fault for pool in self._pools for fault in pool.check())]
        if set(self._book.open_ids()) != set(self._jobs):
            faults.append("open grants and jobs are not the same")
        held = [job.staging_row for job in self._jobs.values() if job.staging_row is not None]
        if sorted([*held, *self._free_rows]) != list(range(self.limits.staging_rows)):
            faults.append("a staging row is lost or held twice")
        if {push for job in self._jobs.values() for push in job.pins} != set(self._flights):
            faults.append("pinned pages and writes in flight are not the same")
        computing = sum(job.phase is Phase.COMPUTING for job in self._jobs.values())
        waiting = sum(job.phase is Phase.WAITING for job in self._jobs.values())
        if computing != len(self._computing) or waiting != len(self._waiting):
            faults.append("a job is in no list or in two")
        return faults

"""Which prompts are computed next, which parts are sent, and when everything they held is given back. Pure.

A job takes all pages that it holds at once when its first chunk is planned, all or nothing, so jobs that hold pages can always
go on.
Jobs that hold pages go before jobs that do not.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence

from engine.batch import Batch, Rows
from engine.layout import GroupLayout
from engine.pages import PagePool
from engine.prefixes import Found, Prefixes
from kv_transfer.grant_writer import GrantWriter, PushesEnded, Transfers
from kv_transfer.grants import AnswerNow, Draining, DuplicateGrant, Filled, GrantRevoked, GrantsFull, WriterBook, WriterOutcome
from kv_transfer.grants import Drained as GrantDrained
from kv_transfer.plan import Computed
from lifecycle.prefix_keys import PrefixKeys
from prefill_svc import messages as m
from prefill_svc.job import Job, Phase
from prefill_svc.plans import Chunk, SchedulerLimits, SchedulerStatistics, StepPlan
from prefill_svc.prompt_pages import PromptPages, most_pages

#: The clocks are gone through when those of jobs that are over outnumber the others by more than this.
CLOCKS_SLACK = 32


class PrefillScheduler:
    """Jobs of one member. `now` is monotonic seconds throughout. `keys`: names prefixes; None: none is kept."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pools: Sequence[PagePool],
        groups: Sequence[GroupLayout],
        book: WriterBook,
        keys: PrefixKeys | None = None,
    ) -> None:
        """pools, groups: of each KV group; the first one keeps all pages where any does."""
        self.limits = limits
        self.prefixes = Prefixes(pools, groups, keys)
        self._pools = tuple(pools)
        self._groups = tuple(groups)
        self._writer = GrantWriter(book, self._pools, self._answer_drain)
        self._jobs: dict[str, Job] = {}
        self._waiting: list[tuple[tuple[int, int], Job]] = []
        self._computing: dict[str, Job] = {}
        #: When each job's clock runs out; entries of jobs that are over stay until they come up or outnumber the others.
        self._clocks: list[tuple[float, int, Job]] = []
        #: Positions not yet computed of all jobs that go on.
        self._left_tokens = 0
        self._free_rows = list(range(limits.staging_rows - 1, -1, -1))
        self._numbers = 0
        self._closed = False
        self._outputs: list[m.Output] = []
        self.ended: Counter[str] = Counter()

    # ---- commands

    def accept(self, commands: Sequence[m.Command], now: float) -> None:
        """Take in what the other actors say, in order."""
        for outcome in self._writer.heard(now):
            self._settle(outcome)
        for command in commands:
            match command:
                case m.Submit():
                    self._submit(command, now)
                case m.Abandon():
                    self._give_up(command.grant_id, m.ABANDONED)
                case m.Drain():
                    self._drain(command)
                case PushesEnded():
                    for outcome in self._writer.ended(command):
                        self._settle(outcome)
                case m.Close():
                    self._close(command)
                case m.Recount():
                    self._outputs.append(m.Recounted(command.asker, self.books(), tuple(self.check())))

    def _submit(self, submit: m.Submit, now: float) -> None:
        refusal, filling = self._refusal(submit), None
        if refusal is None:
            try:
                filling = self._writer.accept(submit.plan, now)
            except GrantRevoked as error:
                refusal = (m.REVOKED, str(error))
            except (GrantsFull, DuplicateGrant) as error:
                refusal = (m.QUEUE_FULL if isinstance(error, GrantsFull) else m.BAD_GRANT, str(error))
        if refusal is not None:
            self.ended[refusal[0]] += 1
            self._outputs.append(m.Failed(submit.grant_id, *refusal))
            return
        assert filling is not None
        self._outputs.append(m.Accepted(submit.grant_id, self._left_tokens))
        job = Job(submit, filling, now, self._numbers)
        self._numbers += 1
        self._jobs[job.grant_id] = job
        self._left_tokens += job.tokens
        insort(self._waiting, (job.rank, job), key=_rank)
        if job.due_at is not None:
            heapq.heappush(self._clocks, (job.due_at, job.number, job))

    def _refusal(self, submit: m.Submit) -> tuple[str, str] | None:
        limits, tokens = self.limits, len(submit.prompt_token_ids)
        if self._closed:
            return m.DRAINING, "this member is shutting down"
        if submit.plan.grant.token_count != tokens:
            return m.BAD_GRANT, f"grant.token_count is {submit.plan.grant.token_count} and the prompt has {tokens} tokens"
        if tokens > limits.context_tokens:
            return m.TOO_LONG, f"prompt_token_ids has {tokens} tokens; the limit is the context of {limits.context_tokens}"
        for pool, count in zip(self._pools, self._wanted(tokens), strict=True):
            if count > pool.usable_pages:
                return m.TOO_LONG, f"the prompt needs {count} pages; this member has {pool.usable_pages}"
        if len(self._jobs) >= limits.max_jobs:
            return m.QUEUE_FULL, f"{limits.max_jobs} jobs (max_jobs) are here already"
        if self._jobs and self._left_tokens + tokens > limits.max_queued_tokens:
            return m.QUEUE_FULL, f"more than {limits.max_queued_tokens} prompt tokens (max_queued_tokens) would wait"
        return None

    def _drain(self, drain: m.Drain) -> None:
        answer = self._writer.drain(drain.grant_id, drain.asker)
        if isinstance(answer, AnswerNow):
            self._ended(drain.grant_id, answer.cause)
        else:
            self._stop_computing(drain.grant_id)

    def _answer_drain(self, asker: int, committed: bool) -> None:
        self._outputs.append(m.Drained(asker, committed))

    def _close(self, close: m.Close) -> None:
        self._closed = True
        if close.expel:
            for grant_id in list(self._jobs):
                self._give_up(grant_id, m.DRAINING)

    # ---- planning

    def next_batch(self, now: float) -> StepPlan | None:
        """The next step within the budgets of tokens and sequences; None when nothing can run."""
        self._expire(now)
        budget, rows, chunks = self.limits.step_tokens, list[Rows](), list[Chunk]()
        blocked: list[Job] = []
        for job in [*self._computing.values(), *self._startable()]:
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
            rows.append(Rows(job.grant_id, ids, job.computed_tokens, job.held.tables, last, adapter=job.submit.adapter))
            chunks.append(Chunk(job.grant_id, tokens, job.staging_row if last else None))
        return StepPlan(Batch(tuple(rows)), tuple(chunks)) if chunks else None

    def _startable(self) -> list[Job]:
        """Waiting jobs in order, as many as one step can look at."""
        return [job for _, job in self._waiting[: self.limits.step_sequences + self.limits.max_pass_over]]

    def _start(self, job: Job, blocked: Sequence[Job], now: float) -> bool:
        """Give a waiting job its pages; False when they are not there. Jobs in `blocked` are passed over by it."""
        wanted = self._wanted(job.tokens)
        found = self._found(job)
        if not self.prefixes.fits(found, wanted, [pool.free_pages for pool in self._pools]):
            return False
        if any(other.passed_over >= self.limits.max_pass_over for other in blocked):
            return False
        for other in blocked:
            other.passed_over += 1
        tables = self.prefixes.reuse(job.grant_id, found)
        job.pages = PromptPages(self._pools, self._groups, job.grant_id, job.tokens, self.limits.step_tokens, tables)
        self._writer.begin(job.filling, job.pages.tables)
        self._leave_queue(job)
        self._computing[job.grant_id] = job
        job.phase, job.started_at, job.last_chunk_at = Phase.COMPUTING, now, now
        self.prefixes.note(len(found.keys), found.pages)
        self._begin_after(job, found.pages, now)
        return True

    def _found(self, job: Job) -> Found:
        """What is here already. Never all of a prompt: its last token is computed for its logits."""
        if job.keys is None:
            job.keys = []
            self.prefixes.extend(job.keys, job.submit.salt, job.submit.prompt_token_ids)
        return self.prefixes.to_compute_on(job.keys[: (job.tokens - 1) // self.prefixes.page_tokens])

    def _begin_after(self, job: Job, pages: int, now: float) -> None:
        """The first `pages` pages of a job were here: they are sent at once, and computing begins behind them."""
        if pages:
            job.indexed = pages
            job.cached_tokens = job.computed_tokens = pages * self.prefixes.page_tokens
            self._left_tokens -= job.cached_tokens
            self._outputs.append(m.Progress(job.grant_id, job.computed_tokens, now, job.cached_tokens))
            self._writer.send(job.filling, Computed(job.computed_tokens), 0, now)

    def _remember(self, job: Job) -> None:
        """Pages that became full can be found, whatever becomes of the job."""
        full = job.computed_tokens // self.prefixes.page_tokens
        if job.keys and full > job.indexed:
            self.prefixes.remember(job.grant_id, job.indexed, job.keys[:full], job.held.gone)
            job.indexed = full

    def _wanted(self, tokens: int) -> list[int]:
        return most_pages(self._groups, tokens, self.limits.step_tokens)

    def _take_row(self, job: Job) -> bool:
        if not self._free_rows:
            return False
        job.staging_row = self._free_rows.pop()
        return True

    def _leave_queue(self, job: Job) -> None:
        del self._waiting[bisect_left(self._waiting, job.rank, key=_rank)]

    def _expire(self, now: float) -> None:
        while (due_at := self.next_wake(now)) is not None and due_at <= now:
            _, _, job = heapq.heappop(self._clocks)
            self._give_up(job.grant_id, m.DEADLINE)

    def next_wake(self, now: float) -> float | None:
        """When something is due although nothing happens: the first clock that runs out."""
        if len(self._clocks) > 2 * len(self._jobs) + CLOCKS_SLACK:
            self._clocks = [entry for entry in self._clocks if entry[2].has_clock]
            heapq.heapify(self._clocks)
        while self._clocks and not self._clocks[0][2].has_clock:
            heapq.heappop(self._clocks)
        return self._clocks[0][0] if self._clocks else None

    # ---- results of a step

    def layers_done(self, plan: StepPlan, layers: int, of_layers: int, now: float) -> None:
        """The step goes on and has written the KV of its rows in so many layers: send the pieces of pages that are complete."""
        for chunk in plan.chunks:
            job = self._jobs[chunk.grant_id]
            computed = Computed(job.computed_tokens, job.computed_tokens + chunk.tokens, layers, of_layers)
            self._writer.send(job.filling, computed, 0, now)

    def commit(self, plan: StepPlan, now: float) -> None:
        """The step has run and last logits lie in their staging rows: note progress. `send` follows."""
        for chunk in plan.chunks:
            job = self._jobs[chunk.grant_id]
            job.computed_tokens += chunk.tokens
            self._left_tokens -= chunk.tokens
            job.last_chunk_at = now
            if job.left_tokens == 0:
                del self._computing[job.grant_id]
                job.phase = Phase.SENDING
            self._remember(job)
            self._outputs.append(m.Progress(job.grant_id, job.computed_tokens, now, job.cached_tokens))

    def send(self, plan: StepPlan, now: float) -> None:
        """Send the parts that a step has made complete, of jobs that nobody has stopped since."""
        for chunk in plan.chunks:
            job = self._jobs.get(chunk.grant_id)
            if job is not None:
                self._writer.send(job.filling, Computed(job.computed_tokens), job.staging_row or 0, now)
                # What the writes just posted still read is pinned.
                job.held.slide(job.computed_tokens)

    def distrust(self, grant_ids: Sequence[str]) -> None:
        """The last logits of these jobs are no numbers, as decode will find: nobody else is to begin with their pages."""
        for grant_id in grant_ids:
            self.prefixes.forget(grant_id, self._jobs[grant_id].keys or ())
            self._jobs[grant_id].keys = []

    def fail_step(self, plan: StepPlan, detail: str) -> None:
        """The step could not be computed: its jobs end, the others go on."""
        for chunk in plan.chunks:
            self._jobs[chunk.grant_id].detail = detail
            self._give_up(chunk.grant_id, m.MODEL_ERROR)

    # ---- endings

    def _settle(self, outcome: WriterOutcome) -> None:
        if isinstance(outcome, Filled):
            job = self._jobs[outcome.grant_id]
            self._release(job)
            self.ended["committed"] += 1
            self._outputs.append(m.Committed(job.grant_id, job.figures()))
        elif isinstance(outcome, GrantDrained):
            self._ended(outcome.grant_id, outcome.cause)
        elif isinstance(outcome, Draining):
            self._stop_computing(outcome.grant_id)

    def _give_up(self, grant_id: str, cause: str) -> None:
        """Stop a job: at once when nothing is in flight, else when its last write has ended."""
        outcome = self._writer.fail(grant_id, cause)
        if outcome is not None:
            self._settle(outcome)
            self._stop_computing(grant_id)

    def _stop_computing(self, grant_id: str) -> None:
        job = self._jobs.get(grant_id)
        if job is None or job.phase is Phase.STOPPING:
            return
        if job.phase is Phase.WAITING:
            self._leave_queue(job)
        elif job.phase is Phase.COMPUTING:
            del self._computing[job.grant_id]
        self._left_tokens -= job.left_tokens
        job.phase = Phase.STOPPING

    def _ended(self, grant_id: str, cause: str) -> None:
        job = self._jobs.get(grant_id)
        if job is None:
            return
        self._stop_computing(grant_id)
        self._release(job)
        self.ended[cause] += 1
        self._outputs.append(m.Failed(grant_id, cause, job.detail or job.filling.problem or f"the hand-over stopped: {cause}"))

    def _release(self, job: Job) -> None:
        """The one place where a job gives back what it holds."""
        del self._jobs[job.grant_id]
        job.over = True
        if job.pages is not None:
            job.pages.release()
        if job.staging_row is not None:
            self._free_rows.append(job.staging_row)

    # ---- what others see

    def take_outputs(self) -> list[m.Output]:
        """Everything to tell since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_transfers(self) -> Transfers:
        """What the transfer thread is to do since the last call."""
        return self._writer.take_transfers()

    def statistics(self) -> SchedulerStatistics:
        """Gauges at this moment."""
        phases = Counter(job.phase for job in self._jobs.values())
        return SchedulerStatistics(
            waiting_jobs=phases[Phase.WAITING],
            computing_jobs=phases[Phase.COMPUTING],
            sending_jobs=phases[Phase.SENDING],
            stopping_jobs=phases[Phase.STOPPING],
            waiting_tokens=self._left_tokens,
            free_pages=self._pools[0].free_pages,
            staging_rows_used=self.limits.staging_rows - len(self._free_rows),
            pushes_in_flight=self._writer.pushes_in_flight,
            pages=self._pools[0].counts(),
            pushed_bytes=self._writer.pushed_bytes,
            prefixes=self.prefixes.statistics(),
        )

    def books(self) -> dict[str, int]:
        """What is held, by name, for a recount."""
        now, counts = self.statistics(), [pool.counts() for pool in self._pools]
        states = ("total", "free", "owned", "cached", "granted", "quarantined", "pinned")
        pages = {f"pages_{state}": sum(getattr(count, state) for count in counts) for state in states}
        grants = self._writer.statistics()
        return {
            **pages,
            "jobs": now.jobs,
            "waiting_tokens": now.waiting_tokens,
            "staging_rows_used": now.staging_rows_used,
            "pushes_in_flight": now.pushes_in_flight,
            "grants_open": grants.accepted + grants.writing + grants.draining,
            "drains_waiting": self._writer.drains_waiting,
        }

    def check(self) -> list[str]:
        """Sentences about anything that does not add up; empty when all is well."""
        faults = [*self._writer.check(), *(fault for pool in self._pools for fault in pool.check())]
        if set(self._writer.open_ids()) != set(self._jobs):
            faults.append("open grants and jobs are not the same")
        held = [job.staging_row for job in self._jobs.values() if job.staging_row is not None]
        if sorted([*held, *self._free_rows]) != list(range(self.limits.staging_rows)):
            faults.append("a staging row is lost or held twice")
        computing = sum(job.phase is Phase.COMPUTING for job in self._jobs.values())
        waiting = sum(job.phase is Phase.WAITING for job in self._jobs.values())
        if computing != len(self._computing) or waiting != len(self._waiting):
            faults.append("a job is in no list or in two")
        left = sum(job.left_tokens for job in self._jobs.values() if job.phase is not Phase.STOPPING)
        if left != self._left_tokens:
            faults.append(f"{self._left_tokens} tokens are counted as not computed, the jobs add up to {left}")
        clocks = {job.grant_id for _, _, job in self._clocks}
        if lost := [job.grant_id for job in self._jobs.values() if job.has_clock and job.grant_id not in clocks]:
            faults.append(f"the clocks of {len(lost)} jobs are not watched")
        return faults


def _rank(entry: tuple[tuple[int, int], Job]) -> tuple[int, int]:
    return entry[0]

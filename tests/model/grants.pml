/* The grant protocol: one member that offers pages (the reader, decode), one that fills them (the writer, prefill), a network
 * that loses, repeats and reorders, crashes of both, restarts under the same name, freezes, and the fence. Checked exhaustively
 * by SPIN; test_grant_model.py says with which bounds. The transitions of both sides are in grant_tables.pml, which is made
 * from the code's own tables.
 *
 * Bounds: GRANTS grants over the whole run, SLOTS sets of pages, PARTS parts to a grant (the last one is the landing row),
 * CRASHES_W and CRASHES_R crashes.
 *
 * Without LIVENESS the world may do what it likes, as often as it likes: a message that was sent once may arrive at any moment from
 * then on, any number of times or never; a Drain may go unanswered; a write may fail. (A frozen process is one to which nothing
 * arrives for long.) This shows that nothing bad happens. With LIVENESS messages are taken out when they arrive, and there are at most
 * FAULTS losses, repeats, late answers, failed writes, freezes and crashes together. This shows, under weak fairness, that all pages
 * come back.
 *
 * SHARED_MEMORY: the transport whose fence is only the proof that the writer is dead. Without it: TCP, where the fence destroys
 * the receiving agent, and where what a dead writer left in a socket still lands.
 * BUG_...: planted faults; each must be found.
 */
#ifndef GRANTS
#define GRANTS 2
#endif
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef PARTS
#define PARTS 2
#endif
#ifndef CRASHES_W
#define CRASHES_W 1
#endif
#ifndef CRASHES_R
#define CRASHES_R 1
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#define TRIES 2
#define INCARNATIONS (CRASHES_W + 1)
#define PUSHES (GRANTS * PARTS)
#define push(g, p) ((g) * PARTS + (p))

#include "grant_tables.pml"

/* What is on its way, in no order. */
bool offer_sent[GRANTS];
bool drain_sent[GRANTS];
bool stopped_sent[GRANTS];      /* answers to Drain: nothing is in flight and nothing will start */
bool other_sent[GRANTS];        /* another incarnation runs here */
bool notice_sent[PUSHES];
#ifdef LIVENESS
byte faults = FAULTS;
#define world_may (faults > 0)
#define world_does faults--
#define answer_lost(g) (!drain_sent[g] && !waiting[g] && !stopped_sent[g] && !other_sent[g])
#define unanswered_now(g) (answer_lost(g) || writer_health != UP)
#else
#define world_may true
#define world_does skip
#define unanswered_now(g) true
#endif

/* The reader. Everything here but the incarnation is lost with the process. A new process has new memory. */
byte reader_incarnation;
mtype:reader_state reader[GRANTS];
byte offered;               /* how many grants were ever offered; an id is never used twice */
byte slot_of[GRANTS];
byte owner[SLOTS];          /* 0: free; g + 1: pages of grant g, its seat's after the commit */
bool arrived[PUSHES];
byte commits[GRANTS];
bool asking[GRANTS];        /* a Drain was sent and its end is not known */
byte silent_tries[GRANTS];
mtype:fence = { NO_FENCE, ASKED, CUT };
mtype:fence fence[INCARNATIONS];    /* of each writer incarnation: being cut off, cut off and not told */
bool cut[GRANTS];           /* the receiving agent of the grant was destroyed: writes to it end in nothing */

/* Who a grant is for; part of its values, wherever they lie. */
byte for_writer[GRANTS];
byte of_reader[GRANTS];

/* The writer. */
mtype:health = { UP, FROZEN, DOWN };
mtype:health writer_health = UP;
byte writer_incarnation;
mtype:writer_state writer[GRANTS];
bool waiting[GRANTS];       /* a Drain waits for parts in flight */

/* A push: NEW, then in the pump's queue, then it may land at any moment (wholly LANDED at least once), then done or failed. */
mtype:phase = { NEW, QUEUED, FLYING, LANDED, DONE, FAILED };
mtype:phase phase[PUSHES];

#define flying(i) (phase[i] == FLYING || phase[i] == LANDED)
#define in_flight(i) (phase[i] == QUEUED || flying(i))
#define gone(k) (k != writer_incarnation || writer_health == DOWN)
#define mine(g) (for_writer[g] == writer_incarnation)
#define here(g) (of_reader[g] == reader_incarnation)
#define reachable(g) (here(g) && !cut[g])
#if SLOTS == 1
#define any_free (owner[0] == 0)
#else
#define any_free (owner[0] == 0 || owner[1] == 0)
#endif
#define open_at_reader(g) (reader[g] == R_OFFERED || reader[g] == R_REVOKING || reader[g] == R_QUARANTINED)
#define open_at_writer(g) (writer[g] == W_ACCEPTED || writer[g] == W_WRITING || writer[g] == W_DRAINING)

/* A message arrives; it may arrive again. */
inline take(message) {
#ifdef LIVENESS
  if
  :: message = false
  :: world_may -> world_does
  fi
#else
  skip
#endif
}

inline offer(g, k) {
  if
  :: owner[0] == 0 -> slot_of[g] = 0
#if SLOTS > 1
  :: else -> slot_of[g] = 1
#endif
  fi;
  offered++;
  owner[slot_of[g]] = g + 1;
  for_writer[g] = k;
  of_reader[g] = reader_incarnation;
  reader[g] = R_OFFERED;
  offer_sent[g] = true;
  k = 0
}

/* The pages of a grant become free. No write of it may land any more. */
inline free_pages(g) {
  assert(owner[slot_of[g]] == g + 1);
  i = 0;
  do
  :: i < PARTS -> assert(!(flying(push(g, i)) && reachable(g))); arrived[push(g, i)] = false; i++
  :: else -> break
  od;
  silent_tries[g] = 0;
  asking[g] = false;
  owner[slot_of[g]] = 0
}

/* The grant's pages and its row are what the seat decodes from now on. */
inline commit(g) {
  reader_step(g, ON_FILLED);
  commits[g]++;
  assert(commits[g] == 1 && owner[slot_of[g]] == g + 1);
  i = 0;
  do
  :: i < PARTS -> assert(phase[push(g, i)] == DONE); i++
  :: else -> break
  od
}

inline ask(g) {
  asking[g] = true;
  drain_sent[g] = true
}

inline take_back(g) {
  reader_step(g, ON_REVOKE);
#ifdef BUG_FREE_ON_REVOKE
  reader_step(g, ON_DRAINED);
  free_pages(g)
#else
  ask(g)
#endif
}

/* The try ended without an answer. */
inline unanswered(g) {
  reader_step(g, ON_UNANSWERED);
#ifdef BUG_TIMEOUT_FREES
  reader_step(g, ON_DRAINED);
  free_pages(g)
#else
  if
  :: silent_tries[g] < TRIES -> silent_tries[g]++
  :: else
  fi;
#ifndef BUG_NEVER_FENCES
  if
  :: silent_tries[g] == TRIES && fence[for_writer[g]] == NO_FENCE -> cut_off(for_writer[g])
  :: else
  fi;
#endif
#ifdef BUG_ASKS_ONCE
  asking[g] = false
#else
  if
  :: open_at_reader(g) -> drain_sent[g] = true
  :: else
  fi
#endif
#endif
}

inline cut_off(k) {
  fence[k] = ASKED;
#ifdef BUG_FREES_WHEN_FENCE_IS_ASKED
  free_fenced(k)
#endif
}

/* All open grants of one writer incarnation end. */
inline free_fenced(k) {
  h = 0;
  do
  :: h < GRANTS ->
    if
    :: here(h) && for_writer[h] == k && open_at_reader(h) -> reader_step(h, ON_FENCED); free_pages(h)
    :: else
    fi;
    h++
  :: else -> break
  od;
  h = 0
}

/* The reader's side of one grant. */
proctype Reader(byte g) {
  byte i, h, k;
end:
  do
  /* A seat wants pages; the router names a writer incarnation, which may be one that is gone. */
  :: atomic { offered == g && any_free && fence[writer_incarnation] == NO_FENCE -> k = writer_incarnation; offer(g, k) }
#if CRASHES_W > 0
  :: atomic { offered == g && any_free && writer_incarnation > 0 && fence[0] == NO_FENCE -> k = 0; offer(g, k) }
#endif
  /* A cancel, a notice that does not fit, a prefill that failed, an expired grant. */
  :: atomic { here(g) && reader[g] == R_OFFERED -> take_back(g); i = 0 }
  :: atomic { here(g) && (reader[g] == R_REVOKING || reader[g] == R_QUARANTINED) && world_may ->
      world_does; reader_step(g, ON_REVOKE)
    }
  /* The answer was lost, nobody is there, or it is late. */
  :: atomic { here(g) && asking[g] && open_at_reader(g) && unanswered_now(g) -> unanswered(g); i = 0; h = 0 }
#ifdef LIVENESS
  :: atomic { here(g) && asking[g] && open_at_reader(g) && world_may -> world_does; unanswered(g); i = 0; h = 0 }
#endif
  :: atomic { stopped_sent[g] ->
      take(stopped_sent[g]);
      if
      :: here(g) && (reader[g] == R_REVOKING || reader[g] == R_QUARANTINED) ->
        reader_step(g, ON_DRAINED); free_pages(g)
      :: else
      fi;
      i = 0
    }
  :: atomic { other_sent[g] ->
      take(other_sent[g]);
      if
      :: here(g) && (reader[g] == R_REVOKING || reader[g] == R_QUARANTINED) ->
        asking[g] = false;
#ifdef BUG_DEATH_IS_A_FENCE
        reader_step(g, ON_DRAINED); free_pages(g)
#else
        reader_step(g, ON_UNANSWERED);
        if
        :: fence[for_writer[g]] == NO_FENCE -> cut_off(for_writer[g])
        :: else
        fi
#endif
      :: else
      fi;
      i = 0; h = 0
    }
  /* The sequence that decodes from the pages ends. */
  :: atomic { here(g) && reader[g] == R_COMMITTED && owner[slot_of[g]] == g + 1 -> free_pages(g); i = 0 }
  od
}

/* Notices of one part, as the receiving agent and the reader see them. */
proctype Notices(byte g, p) {
  byte i;
  bool whole;
end:
  do
  :: atomic { notice_sent[push(g, p)] ->
      take(notice_sent[push(g, p)]);
      if
#ifdef BUG_COMMITS_WHAT_WAS_REVOKED
      :: here(g) && (open_at_reader(g)) ->
#else
      :: here(g) && reader[g] == R_OFFERED ->
#endif
        arrived[push(g, p)] = true;
        i = 0; whole = true;
        do
        :: i < PARTS -> whole = whole && arrived[push(g, i)]; i++
        :: else -> break
        od;
#ifdef BUG_COMMITS_WITH_A_PART_MISSING
        whole = arrived[push(g, PARTS - 1)];
#endif
        if
        :: whole -> commit(g)
        :: else
        fi
#ifdef BUG_COMMITS_TWICE
      :: here(g) && reader[g] == R_COMMITTED -> reader[g] = R_OFFERED; commit(g)
#endif
      :: else
      fi;
      i = 0; whole = false
    }
  od
}

/* The transport's fence: what was posted to these agents lands no more. */
inline mark_cut(k) {
  h = 0;
  do
  :: h < GRANTS ->
    if
#ifdef SHARED_MEMORY
    :: here(h) && for_writer[h] == k && reader[h] != R_NONE && gone(k) -> cut[h] = true
#else
    :: here(h) && for_writer[h] == k && reader[h] != R_NONE -> cut[h] = true
#endif
    :: else
    fi;
    h++
  :: else -> break
  od;
  h = 0
}

/* The reader's transfer thread: cuts a writer off, then says so. */
proctype Fence(byte k) {
  byte i, h;
end:
  do
#if defined(SHARED_MEMORY) && !defined(BUG_DESTROYING_FENCES_SHARED_MEMORY)
  :: atomic { fence[k] == ASKED && gone(k) -> fence[k] = CUT; mark_cut(k) }
#else
  :: atomic { fence[k] == ASKED -> fence[k] = CUT; mark_cut(k) }
#endif
  :: atomic { fence[k] == CUT -> fence[k] = NO_FENCE; free_fenced(k); i = 0 }
  od
}

/* What becomes of one push when its writer dies. */
inline lose_pushes(g, p) {
  if
#ifdef SHARED_MEMORY
  :: in_flight(push(g, p)) -> phase[push(g, p)] = FAILED
#else
  :: phase[push(g, p)] == QUEUED -> phase[push(g, p)] = FAILED
#endif
  :: else
  fi
}

/* Nothing in flight any more: the grant ends and whoever waits is told. */
inline settle(g) {
  i = 0; idle = true;
  do
  :: i < PARTS -> idle = idle && !in_flight(push(g, i)); i++
  :: else -> break
  od;
  if
  :: idle ->
    writer_step(g, ON_IDLE);
    if
    :: waiting[g] -> waiting[g] = false; stopped_sent[g] = true
    :: else
    fi
  :: else
  fi;
  i = 0; idle = false
}

/* The writer's side of one grant. */
proctype Writer(byte g) {
  byte i;
  bool idle;
end:
  do
  :: atomic { offer_sent[g] && writer_health == UP ->
      take(offer_sent[g]);
      if
      :: mine(g) && writer[g] == W_NONE -> writer[g] = W_ACCEPTED
      :: else
      fi
    }
  :: atomic { writer_health == UP && writer[g] == W_ACCEPTED -> writer_step(g, ON_BEGIN) }
  /* Abandoned by the router, past a clock, out of its own lease, a failed step. */
  :: atomic { writer_health == UP && (writer[g] == W_ACCEPTED || writer[g] == W_WRITING) -> writer_step(g, ON_STOP); settle(g) }
  :: atomic { drain_sent[g] && writer_health == UP ->
      take(drain_sent[g]);
      if
#ifndef BUG_INCARNATION_IS_NOT_COMPARED
      :: !mine(g) -> other_sent[g] = true
      :: mine(g) && writer[g] == W_NONE ->
#else
      :: writer[g] == W_NONE ->
#endif
        stopped_sent[g] = true;
#ifndef BUG_NO_TOMBSTONE
        writer[g] = W_DRAINED
#endif
      :: writer[g] == W_COMMITTED || writer[g] == W_DRAINED -> stopped_sent[g] = true
      :: open_at_writer(g) ->
        writer_step(g, ON_STOP);
#ifdef BUG_ANSWERS_WITH_WRITES_IN_FLIGHT
        stopped_sent[g] = true;
        settle(g)
#else
        waiting[g] = true;
        settle(g)
#endif
      fi
    }
  od
}

/* One part on its way: the writer's book, its pump, the transport. */
proctype Push(byte g, p) {
  byte i;
  bool idle;
end:
  do
  :: atomic { writer_health == UP && phase[push(g, p)] == NEW && mine(g) && here(g) &&
#ifdef BUG_POSTS_AFTER_DRAINED
        (writer[g] == W_WRITING || writer[g] == W_DRAINED) -> phase[push(g, p)] = QUEUED
#else
        writer[g] == W_WRITING -> phase[push(g, p)] = QUEUED
#endif
    }
  :: atomic { writer_health == UP && phase[push(g, p)] == QUEUED && reachable(g) -> phase[push(g, p)] = FLYING }
  /* Lands, by the piece, at any moment; the writer's process need not run for it. */
  :: atomic { phase[push(g, p)] == FLYING && reachable(g) ->
      assert(open_at_reader(g) && owner[slot_of[g]] == g + 1);
      phase[push(g, p)] = LANDED
    }
  /* The pump hears of the end, and with it the notice goes out. */
#ifdef BUG_NOTICE_OVERTAKES_DATA
  :: atomic { writer_health == UP && phase[push(g, p)] == FLYING && open_at_writer(g) && reachable(g) -> notice_sent[push(g, p)] = true }
#endif
  :: atomic { writer_health == UP && phase[push(g, p)] == LANDED && mine(g) ->
      phase[push(g, p)] = DONE;
      notice_sent[push(g, p)] = true;
      if
      :: writer[g] == W_DRAINING -> settle(g)
      :: writer[g] == W_WRITING ->
        i = 0; idle = true;
        do
        :: i < PARTS -> idle = idle && phase[push(g, i)] == DONE; i++
        :: else -> break
        od;
        if
        :: idle -> writer_step(g, ON_ALL_SENT)
        :: else
        fi;
        i = 0; idle = false
      :: else
      fi
    }
  /* Withdrawn from the queue, cut off, the reader is gone, or the transport failed. */
  :: atomic { writer_health == UP && in_flight(push(g, p)) && mine(g) && open_at_writer(g) &&
        (!reachable(g) || (phase[push(g, p)] == QUEUED && writer[g] == W_DRAINING) || world_may) ->
      if
      :: reachable(g) && !(phase[push(g, p)] == QUEUED && writer[g] == W_DRAINING) -> world_does
      :: else
      fi;
      phase[push(g, p)] = FAILED;
      writer_step(g, ON_STOP);
      settle(g)
    }
  od
}

/* What the world does: at any moment, or never. */
proctype World() {
  byte g, crashes_w = CRASHES_W, crashes_r = CRASHES_R;
  do
#ifdef LIVENESS
  :: atomic { world_may ->
      world_does;
      do
      :: g < GRANTS - 1 -> g++
      :: break
      od;
      if
      :: offer_sent[g] -> offer_sent[g] = false
      :: drain_sent[g] -> drain_sent[g] = false
      :: stopped_sent[g] -> stopped_sent[g] = false
      :: other_sent[g] -> other_sent[g] = false
      :: notice_sent[push(g, 0)] -> notice_sent[push(g, 0)] = false
#if PARTS > 1
      :: notice_sent[push(g, 1)] -> notice_sent[push(g, 1)] = false
#endif
      :: else
      fi;
      g = 0
    }
  :: atomic { world_may && writer_health == UP -> world_does; writer_health = FROZEN }
#endif
  /* The writer's process dies. Its memory is gone; over TCP what it left in sockets is not. */
  :: atomic { crashes_w > 0 && writer_health != DOWN && world_may ->
      world_does; crashes_w--;
      writer_health = DOWN;
      do
      :: g < GRANTS ->
        writer[g] = W_NONE;
        waiting[g] = false;
        lose_pushes(g, 0);
#if PARTS > 1
        lose_pushes(g, 1);
#endif
        g++
      :: else -> break
      od;
      g = 0
    }
  :: atomic { writer_health == DOWN -> writer_health = UP; writer_incarnation++ }
  /* The reader's process dies and starts again under its name: its grants, its seats and its slabs are gone. */
  :: atomic { crashes_r > 0 && world_may ->
      world_does; crashes_r--;
      reader_incarnation++;
      do
      :: g < GRANTS ->
        if
        :: reader[g] != R_NONE -> reader[g] = R_RECLAIMED
        :: else
        fi;
        asking[g] = false;
        silent_tries[g] = 0;
        g++
      :: else -> break
      od;
      g = 0;
      do
      :: g < PUSHES -> arrived[g] = false; g++
      :: else -> break
      od;
      g = 0;
      do
      :: g < SLOTS -> owner[g] = 0; g++
      :: else -> break
      od;
      g = 0;
      do
      :: g < INCARNATIONS -> fence[g] = NO_FENCE; g++
      :: else -> break
      od;
      g = 0
    }
  :: break
  od
}

/* A frozen process goes on, some time. */
#ifdef LIVENESS
proctype Thaw() {
end:
  do
  :: atomic { writer_health == FROZEN -> writer_health = UP }
  od
}
#endif

#define at_rest(g) (!open_at_reader(g) && !open_at_writer(g))
#if GRANTS == 1
#define all_at_rest at_rest(0)
#elif GRANTS == 2
#define all_at_rest (at_rest(0) && at_rest(1))
#else
#define all_at_rest (at_rest(0) && at_rest(1) && at_rest(2))
#endif
#if SLOTS == 1
#define all_free (owner[0] == 0)
#else
#define all_free (owner[0] == 0 && owner[1] == 0)
#endif

init {
  byte g, k;
  atomic {
    do
    :: g < GRANTS ->
      reader[g] = R_NONE;
      writer[g] = W_NONE;
      run Reader(g);
      run Writer(g);
      k = 0;
      do
      :: k < PARTS -> phase[push(g, k)] = NEW; run Push(g, k); run Notices(g, k); k++
      :: else -> break
      od;
      g++
    :: else -> break
    od;
    k = 0;
    do
    :: k < INCARNATIONS -> fence[k] = NO_FENCE; run Fence(k); k++
    :: else -> break
    od;
    g = 0; k = 0;
    run World();
#ifdef LIVENESS
    run Thaw()
#endif
  }
}

#ifdef LIVENESS
/* Under weak fairness everything that was given out comes back, again and again. */
ltl comes_back { [] <> (all_at_rest && all_free) }
#endif

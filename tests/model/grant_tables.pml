/* Made from kv_transfer/grant_states.py by `python -m tests.model.tables`; a test compares.
 * An event without an edge is an error. */
c_decl {
  /* Says each edge when it is taken for the first time in a whole search; no part of any state. */
  static void taken(int number, const char *edge) {
    static char seen[256];
    if (!seen[number]) { seen[number] = 1; printf("edge %s\n", edge); }
  }
}

mtype:reader_state = { R_NONE, R_OFFERED, R_COMMITTED, R_REVOKING, R_QUARANTINED, R_RECLAIMED };
mtype:writer_state = { W_NONE, W_ACCEPTED, W_WRITING, W_COMMITTED, W_DRAINING, W_DRAINED };
mtype:event = { ON_FILLED, ON_REVOKE, ON_UNANSWERED, ON_DRAINED, ON_FENCED, ON_BEGIN, ON_ALL_SENT, ON_STOP, ON_IDLE };

inline reader_step(g, event) {
  if
  :: reader[g] == R_OFFERED && event == ON_FILLED -> reader[g] = R_COMMITTED; c_code { taken(0, "reader OFFERED FILLED COMMITTED"); }
  :: reader[g] == R_OFFERED && event == ON_REVOKE -> reader[g] = R_REVOKING; c_code { taken(1, "reader OFFERED REVOKE REVOKING"); }
  :: reader[g] == R_OFFERED && event == ON_FENCED -> reader[g] = R_RECLAIMED; c_code { taken(2, "reader OFFERED FENCED RECLAIMED"); }
  :: reader[g] == R_REVOKING && event == ON_REVOKE -> reader[g] = R_REVOKING; c_code { taken(3, "reader REVOKING REVOKE REVOKING"); }
  :: reader[g] == R_REVOKING && event == ON_UNANSWERED -> reader[g] = R_QUARANTINED; c_code { taken(4, "reader REVOKING UNANSWERED QUARANTINED"); }
  :: reader[g] == R_REVOKING && event == ON_DRAINED -> reader[g] = R_RECLAIMED; c_code { taken(5, "reader REVOKING DRAINED RECLAIMED"); }
  :: reader[g] == R_REVOKING && event == ON_FENCED -> reader[g] = R_RECLAIMED; c_code { taken(6, "reader REVOKING FENCED RECLAIMED"); }
  :: reader[g] == R_QUARANTINED && event == ON_REVOKE -> reader[g] = R_QUARANTINED; c_code { taken(7, "reader QUARANTINED REVOKE QUARANTINED"); }
  :: reader[g] == R_QUARANTINED && event == ON_UNANSWERED -> reader[g] = R_QUARANTINED; c_code { taken(8, "reader QUARANTINED UNANSWERED QUARANTINED"); }
  :: reader[g] == R_QUARANTINED && event == ON_DRAINED -> reader[g] = R_RECLAIMED; c_code { taken(9, "reader QUARANTINED DRAINED RECLAIMED"); }
  :: reader[g] == R_QUARANTINED && event == ON_FENCED -> reader[g] = R_RECLAIMED; c_code { taken(10, "reader QUARANTINED FENCED RECLAIMED"); }
  :: else -> assert(false)
  fi
}

inline writer_step(g, event) {
  if
  :: writer[g] == W_ACCEPTED && event == ON_BEGIN -> writer[g] = W_WRITING; c_code { taken(11, "writer ACCEPTED BEGIN WRITING"); }
  :: writer[g] == W_ACCEPTED && event == ON_STOP -> writer[g] = W_DRAINING; c_code { taken(12, "writer ACCEPTED STOP DRAINING"); }
  :: writer[g] == W_WRITING && event == ON_ALL_SENT -> writer[g] = W_COMMITTED; c_code { taken(13, "writer WRITING ALL_SENT COMMITTED"); }
  :: writer[g] == W_WRITING && event == ON_STOP -> writer[g] = W_DRAINING; c_code { taken(14, "writer WRITING STOP DRAINING"); }
  :: writer[g] == W_DRAINING && event == ON_STOP -> writer[g] = W_DRAINING; c_code { taken(15, "writer DRAINING STOP DRAINING"); }
  :: writer[g] == W_DRAINING && event == ON_IDLE -> writer[g] = W_DRAINED; c_code { taken(16, "writer DRAINING IDLE DRAINED"); }
  :: else -> assert(false)
  fi
}

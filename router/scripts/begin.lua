-- Makes a record and places its first attempt, in one step. A record that was there already is told as by `create`.
-- KEYS: record, tombstones, tombstone notes, owned ids of the router, leases, memory, reserved
-- ARGV: copy as queued, operation, live_ttl_s, retention_s, lease_s, settle_s, mark that the router knows, copy as cancelled at once,
-- copy when the claims are taken, claims. The revision of the last copy is the newer one.
local queued, granted = cjson.decode(ARGV[1]), cjson.decode(ARGV[9])
local times = { ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7] }
local outcome, record, wait_s = create(KEYS, queued, ARGV[8], ARGV[2], times)
if outcome ~= 'created' then
  return cjson.encode({ outcome = outcome, record = record, wait_s = wait_s })
end
queued.fields.revision = granted.fields.revision
local placed = place(KEYS[1], KEYS[7], granted, queued, cjson.decode(ARGV[10]), ARGV[3])
return cjson.encode({ outcome = outcome, placed = placed })

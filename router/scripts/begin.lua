-- Makes a record and places its first attempt, in one step. A record that was there already is told as by `create`.
-- KEYS: record, tombstones, tombstone notes, owned ids of the router, leases, reserved
-- ARGV: copy as queued, operation, live_ttl_s, retention_s, lease_s, copy as cancelled at once, copy when the claims are taken,
-- claims. The revision of the last copy is the newer one.
local queued, granted = cjson.decode(ARGV[1]), cjson.decode(ARGV[7])
local outcome, record = create(KEYS, queued, ARGV[6], ARGV[2], { ARGV[3], ARGV[4], ARGV[5] })
if outcome ~= 'created' then
  return cjson.encode({ outcome = outcome, record = record })
end
queued.fields.revision = granted.fields.revision
local placed = place(KEYS[1], KEYS[6], granted, queued, cjson.decode(ARGV[8]), ARGV[3])
return cjson.encode({ outcome = outcome, placed = placed })

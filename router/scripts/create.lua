-- KEYS: record, tombstones, tombstone notes, owned ids of the router, leases, memory
-- ARGV: copy, operation, live_ttl_s, retention_s, lease_s, settle_s, mark that the router knows, copy as cancelled at once
local times = { ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7] }
local outcome, record, wait_s = create(KEYS, cjson.decode(ARGV[1]), ARGV[8], ARGV[2], times)
return cjson.encode({ outcome = outcome, record = record, wait_s = wait_s })

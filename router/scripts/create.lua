-- KEYS: record, tombstones, tombstone notes, owned ids of the router, leases
-- ARGV: copy, operation, live_ttl_s, retention_s, lease_s, copy of the record as cancelled at once
local outcome, record = create(KEYS, cjson.decode(ARGV[1]), ARGV[6], ARGV[2], { ARGV[3], ARGV[4], ARGV[5] })
return cjson.encode({ outcome = outcome, record = record })

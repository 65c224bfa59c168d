-- Whether a router lives, where it is, and whether the server remembers a heartbeat of who asks: { 1 or 0, address, 1 or 0 }. A
-- lease is no sign of that: requests make one, too.
-- KEYS: leases, addresses
-- ARGV: router, who asks
local expiry = redis.call('ZSCORE', KEYS[1], ARGV[1])
local alive = expiry and tonumber(expiry) > server_time()
return { alive and 1 or 0, redis.call('HGET', KEYS[2], ARGV[1]) or '', redis.call('HGET', KEYS[2], ARGV[2]) and 1 or 0 }

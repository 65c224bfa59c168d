-- Whether a router lives, where it is, and whether there is a lease of who asks, run out or not: { 1 or 0, address, 1 or 0 }.
-- KEYS: leases, addresses
-- ARGV: router, who asks
local expiry = redis.call('ZSCORE', KEYS[1], ARGV[1])
local alive = expiry and tonumber(expiry) > server_time()
return { alive and 1 or 0, redis.call('HGET', KEYS[2], ARGV[1]) or '', redis.call('ZSCORE', KEYS[1], ARGV[2]) and 1 or 0 }

-- Whether a router lives, and where it is: { 1 or 0, address }.
-- KEYS: leases, addresses
-- ARGV: router
local expiry = redis.call('ZSCORE', KEYS[1], ARGV[1])
local alive = expiry and tonumber(expiry) > server_time()
return { alive and 1 or 0, redis.call('HGET', KEYS[2], ARGV[1]) or '' }

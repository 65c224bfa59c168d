-- Drops the lease of a router that is dead and owns nothing.
-- KEYS: leases, owned ids of the router, addresses
-- ARGV: router
local expiry = redis.call('ZSCORE', KEYS[1], ARGV[1])
if expiry and tonumber(expiry) <= server_time() and redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[3], ARGV[1])
  return 1
end
return 0

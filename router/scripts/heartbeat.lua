-- Renews the lease of a router. Returns "held", "lapsed" (it had run out) or "new", and the ids of its requests with a cancel
-- flagged.
-- KEYS: leases, cancels, owned ids of the router
-- ARGV: router, lease_s, live_ttl_s
local router = ARGV[1]
local now = server_time()
local before = redis.call('ZSCORE', KEYS[1], router)
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), router)
for _, key in ipairs(KEYS) do
  redis.call('EXPIRE', key, ARGV[3])
end
local flagged = {}
local cancels = redis.call('HGETALL', KEYS[2])
for i = 1, #cancels, 2 do
  if cancels[i + 1] == router then
    flagged[#flagged + 1] = cancels[i]
  end
end
local was = 'new'
if before then
  was = tonumber(before) > now and 'held' or 'lapsed'
end
return { was, flagged }

-- Renews the lease of a router. Returns "held", "lapsed" (it had run out) or "new" (also when only its own requests, written
-- again, have made one since the server lost its memory: its address is not there then), the ids of its requests with a cancel
-- flagged, and the name of the run of writes that the server's data comes from: another one after a restart or a failover, when
-- writes that were acknowledged can be missing; empty when the server does not tell.
-- Last the mark of what the server remembers, see memory.lua.
-- KEYS: leases, cancels, owned ids of the router, addresses, memory
-- ARGV: router, lease_s, live_ttl_s, address, settle_s, mark that the router knows
local router = ARGV[1]
local now = server_time()
local before = redis.call('ZSCORE', KEYS[1], router)
local known = before and (ARGV[4] == '' or redis.call('HGET', KEYS[4], router))
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), router)
local _, made, run = unsettled_s(KEYS[5], now, tonumber(ARGV[5]), ARGV[3], ARGV[6])
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[4], router, ARGV[4])
end
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
if known then
  was = tonumber(before) > now and 'held' or 'lapsed'
end
return { was, flagged, run, made }

-- What a cell holds. Changes nothing.
-- KEYS: reserved, leases, tombstones
-- Returns the server's time, the fields of `reserved`, routers with the ends of their leases, how many tombstones are valid.
local now = string.format('%.6f', server_time())
return {
  now,
  redis.call('HGETALL', KEYS[1]),
  redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES'),
  redis.call('ZCOUNT', KEYS[3], now, '+inf'),
}

-- What some budgets hold, and the routers of the cell. Changes nothing, and costs the same however many requests there are.
-- KEYS: reserved, leases, addresses
-- ARGV: labels of budgets
-- Returns the server's time, units of each label, routers with the ends of their leases, routers with their addresses.
local units = {}
for i, label in ipairs(ARGV) do
  units[i] = redis.call('HGET', KEYS[1], 't' .. SEP .. label) or '0'
end
return {
  string.format('%.6f', server_time()),
  units,
  redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES'),
  redis.call('HGETALL', KEYS[3]),
}

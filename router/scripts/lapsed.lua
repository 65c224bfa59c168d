-- Names of routers whose lease has run out by the server's clock. Changes nothing.
-- KEYS: leases
-- ARGV: most names
local now = string.format('%.6f', server_time())
return redis.call('ZRANGE', KEYS[1], '-inf', now, 'BYSCORE', 'LIMIT', 0, ARGV[1])

-- Seconds, as text, until the server can not lack anything that it was told; see memory.lua.
-- KEYS: memory
-- ARGV: settle_s, live_ttl_s, the mark that the router knows
local left_s = unsettled_s(KEYS[1], server_time(), tonumber(ARGV[1]), ARGV[2], ARGV[3])
return tostring(left_s)

-- Gives back reservations that no live record holds, drops a cancel flag that no live record carries, and takes an id that is
-- no live request of the router off its list.
-- KEYS: record, reserved, cancels, owned ids of the router
-- ARGV: id, JSON list of [label, attempt] found for that id, router
local id = ARGV[1]
local record = load_record(KEYS[1])
local live = record and not TERMINAL[record.state]
if not live then
  redis.call('HDEL', KEYS[3], id)
end
if not live or record.router ~= ARGV[3] then
  redis.call('SREM', KEYS[4], id)
end
local held = {}
if live then
  for _, hold in ipairs(cjson.decode(record.holds)) do
    held[hold[2] .. SEP .. hold[1]] = true
  end
end
local found = cjson.decode(ARGV[2])
local kept = give_back(KEYS[2], id, found, function(hold)
  return held[hold[2] .. SEP .. hold[1]] == true
end)
return #found - #kept

-- Ends one request of a router whose lease has run out, if that is still so.
-- KEYS: record, reserved, owned ids of the router, cancels, leases
-- ARGV: id, router, time, retention_s, ending of a lost router, ending of a cancelled request, most transitions kept,
-- "spare" when a request whose decode member may still have its seat is to be left alone
local id = ARGV[1]
local expiry = redis.call('ZSCORE', KEYS[5], ARGV[2])
if expiry and tonumber(expiry) > server_time() then
  return 'alive'
end
local record = load_record(KEYS[1])
if not record or record.router ~= ARGV[2] or TERMINAL[record.state] then
  redis.call('SREM', KEYS[3], id)
  return 'gone'
end

local waits = { created = true, queued = true, admitted = true }
if ARGV[8] == 'spare' and not waits[record.state] and (record.decode_incarnation or '') ~= '' then
  return 'seated'
end

local events, ending = { 'fail' }, ARGV[5]
if record.cancel_requested_at ~= '' then
  events, ending = { 'cancel', 'released' }, ARGV[6]
  if record.state == 'cancel_requested' then
    events = { 'released' }
  end
end
local steps = cjson.decode(record.transitions)
local state = record.state
for _, event in ipairs(events) do
  state = EDGES[state][event]
  steps[#steps + 1] = { state, event, ARGV[3], tonumber(record.attempt), '' }
end
while #steps > tonumber(ARGV[7]) do
  table.remove(steps, 1)
end
local fields = { state = state, ending = ending, transitions = cjson.encode(steps), holds = '[]' }
if record.cancel_requested_at ~= '' then
  if record.cancel_observed_at == '' then
    fields.cancel_observed_at = ARGV[3]
  end
  fields.cancel_effective_at = ARGV[3]
end
give_back(KEYS[2], id, cjson.decode(record.holds), nil)
save(KEYS[1], record, fields, ARGV[4])
redis.call('SREM', KEYS[3], id)
redis.call('HDEL', KEYS[4], id)
return 'ended'

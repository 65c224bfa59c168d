-- Writes the end once. Who comes second gets the record of who came first.
-- KEYS: record, reserved, owned ids of the router, cancels
-- ARGV: copy (ended), retention_s
local copy = cjson.decode(ARGV[1])
local record = load_record(KEYS[1])
local id = copy.fields.request_id
local steps = cjson.decode(copy.fields.transitions)

if record then
  local refused = refusal(record, copy)
  if refused == 'ended' and record.router == copy.fields.router and last_step(record) == cjson.encode(steps[#steps]) then
    return cjson.encode({ outcome = 'applied', record = record })
  elseif refused then
    return cjson.encode({ outcome = refused, record = record })
  end
end
if not TERMINAL[copy.fields.state] or not follows_table(steps, copy.fields.state) then
  return cjson.encode({ outcome = 'no_edge', record = record })
end
if record then
  give_back(KEYS[2], id, cjson.decode(record.holds), nil)
else
  record = {}
  copy.fields.created_operation = ''
  copy.fields.created_outcome = 'created'
end
local fields = merged(record.state and record, copy)
fields.holds = '[]'
save(KEYS[1], record, fields, ARGV[2])
redis.call('SREM', KEYS[3], id)
redis.call('HDEL', KEYS[4], id)
return cjson.encode({ outcome = 'applied', record = record })

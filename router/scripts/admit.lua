-- Places an attempt: takes all claims or none, and makes the record what the copy for that case says.
-- KEYS: record, reserved
-- ARGV: copy when the claims are taken, copy when they are not, claims, live_ttl_s
local granted = cjson.decode(ARGV[1])
local short = cjson.decode(ARGV[2])
local claims = cjson.decode(ARGV[3])
local record = load_record(KEYS[1])
local id = granted.fields.request_id

if record and record.revision == granted.fields.revision then
  return record.reply
end
local refused = refusal(record, granted)
if refused then
  return standing(refused, record)
end
for _, copy in ipairs({ granted, short }) do
  if not follows_table(cjson.decode(copy.fields.transitions), copy.fields.state) then
    return standing('no_edge', record)
  end
end

-- What an earlier attempt, or an earlier call whose answer was lost, still holds.
give_back(KEYS[2], id, cjson.decode(record.holds), nil)

local shortage = shortage_of(KEYS[2], claims)
local copy, outcome, holds = granted, 'applied', {}
if shortage then
  copy, outcome = short, 'short'
else
  holds = take(KEYS[2], id, tonumber(granted.fields.attempt), claims, ARGV[4])
end
local fields = merged(record, copy)
fields.holds = encode_list(holds)
save(KEYS[1], record, fields, ARGV[4])
local reply = standing(outcome, record, shortage)
redis.call('HSET', KEYS[1], 'reply', reply)
return reply

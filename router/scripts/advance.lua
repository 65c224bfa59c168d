-- Brings the record up to the owner's copy, which has not ended.
-- KEYS: record, reserved
-- ARGV: copy, live_ttl_s
local copy = cjson.decode(ARGV[1])
local record = load_record(KEYS[1])
local refused = refusal(record, copy)
if refused == 'stale' then
  return standing('applied', record)
elseif refused then
  return standing(refused, record)
end
if not follows_table(cjson.decode(copy.fields.transitions), copy.fields.state) then
  return standing('no_edge', record)
end
local kept = give_back_by_phase(KEYS[2], copy.fields.request_id, record, copy)
local fields = merged(record, copy)
fields.holds = encode_list(kept)
save(KEYS[1], record, fields, ARGV[2])
return standing('applied', record)

-- Places an attempt: takes all claims or none, and makes the record what the copy for that case says. Returns the reply.
-- `granted`: copy when the claims are taken; `short`: copy when they are not.
local function place(record_key, reserved, granted, short, claims, live_ttl_s)
  local record = load_record(record_key)
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
  give_back(reserved, id, cjson.decode(record.holds), nil)

  local shortage = shortage_of(reserved, claims)
  local copy, outcome, holds = granted, 'applied', {}
  if shortage then
    copy, outcome = short, 'short'
  else
    holds = take(reserved, id, tonumber(granted.fields.attempt), claims, live_ttl_s)
  end
  local fields = merged(record, copy)
  fields.holds = encode_list(holds)
  save(record_key, record, fields, live_ttl_s)
  local reply = standing(outcome, record, shortage)
  redis.call('HSET', record_key, 'reply', reply)
  return reply
end

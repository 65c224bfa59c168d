-- Takes a live request over from a router whose lease has run out, if that is still so.
-- KEYS: record, reserved, owned ids of the old router, owned ids of the new router, cancels, leases
-- ARGV: id, old router, new router, live_ttl_s, "seatless" when only a request that never had a seat is wanted
-- Answers with the record and what it holds: { label, attempt, units } each. Called again by the new router it changes nothing.
local id, old, new = ARGV[1], ARGV[2], ARGV[3]
local record = load_record(KEYS[1])
if not record or TERMINAL[record.state] or (record.router ~= old and record.router ~= new) then
  return cjson.encode({ outcome = 'gone', holds = '[]' })
end
if record.router == old then
  local expiry = redis.call('ZSCORE', KEYS[6], old)
  if expiry and tonumber(expiry) > server_time() then
    return cjson.encode({ outcome = 'alive', holds = '[]' })
  end
  local seatless = record.state == 'created' or record.state == 'queued' or record.state == 'admitted'
  if ARGV[5] == 'seatless' and not seatless then
    return cjson.encode({ outcome = 'gone', holds = '[]' })
  end
  -- The new owner counts its writes from its own start: any of them is newer than those of the old one.
  save(KEYS[1], record, { router = new, revision = '0' }, ARGV[4])
  redis.call('SADD', KEYS[4], id)
  redis.call('EXPIRE', KEYS[4], ARGV[4])
  redis.call('SREM', KEYS[3], id)
  if record.cancel_requested_at ~= '' then
    redis.call('HSET', KEYS[5], id, new)
  end
end
local holds = {}
for _, hold in ipairs(cjson.decode(record.holds)) do
  local units = redis.call('HGET', KEYS[2], table.concat({ 'h', id, tostring(hold[2]), hold[1] }, SEP))
  if units then
    holds[#holds + 1] = { hold[1], hold[2], tonumber(units) }
  end
end
return cjson.encode({ outcome = 'adopted', record = record, holds = encode_list(holds) })

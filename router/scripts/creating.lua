-- Makes a record, or says what is there. Returns the outcome and the stored record.
-- With "unsettled" there is none, and a third value: the seconds after which it is known whether there is one (see memory.lua).
-- `names`: keys of the record, tombstones, tombstone notes, owned ids of the router, leases, memory.
-- `cancelled_text`: the copy as cancelled at once. `times`: live_ttl_s, retention_s, lease_s, settle_s, and the mark that the router knows.
local function create(names, copy, cancelled_text, operation, times)
  local record = load_record(names[1])
  local id = copy.fields.request_id

  if record then
    local outcome = 'existing'
    if record.fingerprint ~= copy.fields.fingerprint then
      outcome = 'conflict'
    elseif record.created_operation == operation then
      outcome = record.created_outcome
    end
    return outcome, record
  end

  local now = server_time()
  record = {}
  local graves = { id, grave_of(id, copy.fields.tenant) }
  local note
  for _, grave in ipairs(graves) do
    local buried_until = redis.call('ZSCORE', names[2], grave)
    if buried_until and tonumber(buried_until) > now then
      note = note or redis.call('HGET', names[3], grave)
    end
  end

  if note then
    local cancel = cjson.decode(note)
    local cancelled = cjson.decode(cancelled_text)
    if not follows_table(cjson.decode(cancelled.fields.transitions), cancelled.fields.state) then
      error('the lifecycle has no edges from created to cancelled')
    end
    cancelled.fields.cancel_requested_at = cancel.at
    cancelled.fields.cancel_reason = cancel.reason
    cancelled.fields.created_operation = operation
    cancelled.fields.created_outcome = 'already_cancelled'
    cancelled.fields.holds = '[]'
    save(names[1], record, cancelled.fields, times[2])
    redis.call('ZREM', names[2], unpack(graves))
    redis.call('HDEL', names[3], unpack(graves))
    return 'already_cancelled', record
  end

  local wait_s = unsettled_s(names[6], now, tonumber(times[4]), times[1], times[5])
  if wait_s > 0 then
    return 'unsettled', nil, wait_s
  end

  copy.fields.created_operation = operation
  copy.fields.created_outcome = 'created'
  copy.fields.holds = '[]'
  save(names[1], record, copy.fields, times[1])
  redis.call('ZREM', names[2], unpack(graves))
  redis.call('HDEL', names[3], unpack(graves))
  redis.call('SADD', names[4], id)
  redis.call('EXPIRE', names[4], times[1])
  redis.call('ZADD', names[5], 'NX', now + tonumber(times[3]), record.router)
  redis.call('EXPIRE', names[5], times[1])
  return 'created', record
end

-- KEYS: record, tombstones, tombstone notes, owned ids of the router, leases
-- ARGV: copy, operation, live_ttl_s, retention_s, lease_s, copy of the record as cancelled at once
local copy = cjson.decode(ARGV[1])
local operation = ARGV[2]
local record = load_record(KEYS[1])
local id = copy.fields.request_id

if record then
  local outcome = 'existing'
  if record.fingerprint ~= copy.fields.fingerprint then
    outcome = 'conflict'
  elseif record.created_operation == operation then
    outcome = record.created_outcome
  end
  return cjson.encode({ outcome = outcome, record = record })
end

local now = server_time()
record = {}
local note = redis.call('HGET', KEYS[3], id)
local buried_until = redis.call('ZSCORE', KEYS[2], id)

if note and buried_until and tonumber(buried_until) > now then
  local cancel = cjson.decode(note)
  local cancelled = cjson.decode(ARGV[6])
  cancelled.fields.cancel_requested_at = cancel.at
  cancelled.fields.cancel_reason = cancel.reason
  cancelled.fields.created_operation = operation
  cancelled.fields.created_outcome = 'already_cancelled'
  cancelled.fields.holds = '[]'
  if not follows_table(cjson.decode(cancelled.fields.transitions), cancelled.fields.state) then
    return redis.error_reply('the lifecycle has no edges from created to cancelled')
  end
  save(KEYS[1], record, cancelled.fields, ARGV[4])
  redis.call('ZREM', KEYS[2], id)
  redis.call('HDEL', KEYS[3], id)
  return cjson.encode({ outcome = 'already_cancelled', record = record })
end

copy.fields.created_operation = operation
copy.fields.created_outcome = 'created'
copy.fields.holds = '[]'
save(KEYS[1], record, copy.fields, ARGV[3])
redis.call('ZREM', KEYS[2], id)
redis.call('HDEL', KEYS[3], id)
redis.call('SADD', KEYS[4], id)
redis.call('EXPIRE', KEYS[4], ARGV[3])
redis.call('ZADD', KEYS[5], 'NX', now + tonumber(ARGV[5]), record.router)
redis.call('EXPIRE', KEYS[5], ARGV[3])
return cjson.encode({ outcome = 'created', record = record })

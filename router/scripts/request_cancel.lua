-- Flags a cancel on the record and tells its owner; leaves a tombstone for an id that is not known.
-- KEYS: record, tombstones, tombstone notes, cancels
-- ARGV: id, time, reason, tombstone_s, max_tombstones, channel prefix of the cell, live_ttl_s,
-- tenant whose request alone it may be ('': anybody's)
local id, tenant = ARGV[1], ARGV[8]
local record = load_record(KEYS[1])

if record and tenant ~= '' and record.tenant ~= tenant then
  return cjson.encode({ outcome = 'not_theirs', state = '', ending = '', owner = '' })
end

if record and TERMINAL[record.state] then
  return cjson.encode({ outcome = 'already_ended', state = record.state, ending = record.ending, owner = '' })
end

if record then
  if record.cancel_requested_at == '' then
    redis.call('HSET', KEYS[1], 'cancel_requested_at', ARGV[2], 'cancel_reason', ARGV[3])
  end
  redis.call('HSET', KEYS[4], id, record.router)
  redis.call('EXPIRE', KEYS[4], ARGV[7])
  redis.call('PUBLISH', ARGV[6] .. record.router, id)
  return cjson.encode({ outcome = 'accepted', state = record.state, ending = '', owner = record.router })
end

id = grave_of(id, tenant)
local now = server_time()
local buried_until = redis.call('ZSCORE', KEYS[2], id)
local note = cjson.encode({ at = ARGV[2], reason = ARGV[3] })
if buried_until and tonumber(buried_until) > now then
  redis.call('HSETNX', KEYS[3], id, note)
else
  redis.call('HSET', KEYS[3], id, note)
end
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[4]), id)
redis.call('EXPIRE', KEYS[2], tonumber(ARGV[4]) * 2)
redis.call('EXPIRE', KEYS[3], tonumber(ARGV[4]) * 2)
for _, old in ipairs(redis.call('ZRANGE', KEYS[2], '-inf', now, 'BYSCORE')) do
  redis.call('ZREM', KEYS[2], old)
  redis.call('HDEL', KEYS[3], old)
end
while redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[5]) do
  local oldest = redis.call('ZPOPMIN', KEYS[2])
  redis.call('HDEL', KEYS[3], oldest[1])
end
return cjson.encode({ outcome = 'accepted', state = '', ending = '', owner = '' })

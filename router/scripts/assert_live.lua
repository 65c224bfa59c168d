-- As advance, and heals: a record that is missing is made anew, what its attempt holds is held again. Whoever owns a request has
-- a lease that can run out: without one nobody would take the router for dead.
-- KEYS: record, reserved, owned ids of the router, cancels, leases
-- ARGV: copy, claims, live_ttl_s, lease_s
local copy = cjson.decode(ARGV[1])
local claims = cjson.decode(ARGV[2])
local record = load_record(KEYS[1])
local id = copy.fields.request_id
local refused = record and refusal(record, copy)
if refused == 'stale' then
  return standing('applied', record)
elseif refused then
  return standing(refused, record)
end
if not follows_table(cjson.decode(copy.fields.transitions), copy.fields.state) then
  return standing('no_edge', record)
end
local holds = {}
if record then
  give_back_by_phase(KEYS[2], id, record, copy)
else
  record = {}
  copy.fields.created_operation = ''
  copy.fields.created_outcome = 'created'
end
if copy.phase ~= 'nothing' then
  holds = take(KEYS[2], id, tonumber(copy.fields.attempt), claims, ARGV[3])
end
local fields = merged(record.state and record, copy)
fields.holds = encode_list(holds)
save(KEYS[1], record, fields, ARGV[3])
redis.call('SADD', KEYS[3], id)
redis.call('EXPIRE', KEYS[3], ARGV[3])
redis.call('ZADD', KEYS[5], 'NX', server_time() + tonumber(ARGV[4]), record.router)
redis.call('EXPIRE', KEYS[5], ARGV[3])
if record.cancel_requested_at ~= '' then
  redis.call('HSET', KEYS[4], id, record.router)
  redis.call('EXPIRE', KEYS[4], ARGV[3])
end
return standing('applied', record)

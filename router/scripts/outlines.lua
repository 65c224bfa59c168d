-- Owner, state and holds of each record, nil where there is none. Changes nothing.
-- KEYS: records
local found = {}
for i, key in ipairs(KEYS) do
  found[i] = redis.call('HMGET', key, 'router', 'state', 'holds')
end
return found

-- Put before every script, after the tables EDGES (state -> event -> state) and TERMINAL (state -> true), made from
-- the lifecycle's table when the scripts are loaded, and TOKENS, how labels of token budgets begin. Commands of Redis 7.2 only.
--
-- A record is a hash of strings. `transitions` is a JSON list of [state, event, time, attempt, detail]; `holds` a JSON list of
-- [budget label, attempt]. Times are text, so that they come back exactly as they were written.
--
-- The owner's writes carry a `copy` of the record with a revision that rises with each write of that owner. A write that is
-- not newer than the last one is a repetition, or one that was overtaken: it changes nothing.
--
-- A server out of memory refuses commands that may need some (HSET, HINCRBY, ZADD), but not others (HDEL, ZREM): in every
-- script the first write is one of the former, so that a script runs whole or not at all.
--
-- Reservations are fields of one hash: "h" SEP id SEP attempt SEP label -> units, and "t" SEP label -> their sum.

local SEP = '\31'

-- The name of the tombstone of an id: of the one that a tenant left for its own requests, or ('') of anybody's.
local function grave_of(id, tenant)
  if tenant == '' then
    return id
  end
  return tenant .. SEP .. id
end

local function server_time()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local function load_record(key)
  local flat = redis.call('HGETALL', key)
  if #flat == 0 then
    return nil
  end
  local record = {}
  for i = 1, #flat, 2 do
    record[flat[i]] = flat[i + 1]
  end
  return record
end

-- Writes the fields into the hash and into `record`, the table that stands for it.
local function save(key, record, fields, ttl_s)
  local flat = {}
  for name, value in pairs(fields) do
    flat[#flat + 1] = name
    flat[#flat + 1] = value
    record[name] = value
  end
  redis.call('HSET', key, unpack(flat))
  redis.call('EXPIRE', key, ttl_s)
end

-- An empty Lua table would become a JSON object.
local function encode_list(list)
  if #list == 0 then
    return '[]'
  end
  return cjson.encode(list)
end

local function standing(outcome, record, shortage)
  local reply = { outcome = outcome, shortage = shortage }
  if record then
    reply.state = record.state
    reply.attempt = tonumber(record.attempt)
    reply.ending = record.ending
    reply.cancel_requested_at = record.cancel_requested_at
    reply.cancel_reason = record.cancel_reason
  end
  return cjson.encode(reply)
end

-- Why the owner's write must not be carried out; nil when it may. "stale" is a repetition or an overtaken write.
local function refusal(record, copy)
  if not record then
    return 'unknown'
  end
  if TERMINAL[record.state] then
    return 'ended'
  end
  if record.router ~= copy.fields.router then
    return 'other_owner'
  end
  if tonumber(record.attempt) > tonumber(copy.fields.attempt) then
    return 'other_attempt'
  end
  if tonumber(record.revision) >= tonumber(copy.fields.revision) then
    return 'stale'
  end
  return nil
end

-- Whether each transition follows from the one before it, and the last one is the state.
local function follows_table(steps, state)
  for i = 2, #steps do
    local edges = EDGES[steps[i - 1][1]]
    if not edges or edges[steps[i][2]] ~= steps[i][1] then
      return false
    end
  end
  return #steps > 0 and steps[#steps][1] == state
end

local function last_step(record)
  local steps = cjson.decode(record.transitions)
  return cjson.encode(steps[#steps])
end

-- Gives back the holds for which `keep` does not answer true. Returns those that are kept.
local function give_back(reserved, id, holds, keep)
  local kept = {}
  for _, hold in ipairs(holds) do
    if keep and keep(hold) then
      kept[#kept + 1] = hold
    else
      local field = table.concat({ 'h', id, tostring(hold[2]), hold[1] }, SEP)
      local units = redis.call('HGET', reserved, field)
      if units then
        local total = 't' .. SEP .. hold[1]
        local left = redis.call('HINCRBY', reserved, total, -units)
        redis.call('HDEL', reserved, field)
        if left <= 0 then
          redis.call('HDEL', reserved, total)
        end
      end
    end
  end
  return kept
end

-- The first claim that does not fit, as a table for the reply; nil when all fit.
local function shortage_of(reserved, claims)
  for _, claim in ipairs(claims) do
    local taken = tonumber(redis.call('HGET', reserved, 't' .. SEP .. claim.label) or '0')
    if taken + claim.amount > claim.limit then
      return { label = claim.label, wanted = claim.amount, taken = taken, limit = claim.limit }
    end
  end
  return nil
end

-- Takes what is not held yet, whatever the limits. Returns the holds.
local function take(reserved, id, attempt, claims, ttl_s)
  local holds = {}
  for _, claim in ipairs(claims) do
    if claim.amount > 0 then
      local field = table.concat({ 'h', id, tostring(attempt), claim.label }, SEP)
      if redis.call('HSETNX', reserved, field, claim.amount) == 1 then
        redis.call('HINCRBY', reserved, 't' .. SEP .. claim.label, claim.amount)
      end
      holds[#holds + 1] = { claim.label, attempt }
    end
  end
  redis.call('EXPIRE', reserved, ttl_s)
  return holds
end

-- What the record may go on holding in the copy's state ("nothing", "pages" or "everything").
local function give_back_by_phase(reserved, id, record, copy)
  local attempt = tonumber(copy.fields.attempt)
  return give_back(reserved, id, cjson.decode(record.holds), function(hold)
    if hold[2] ~= attempt or copy.phase == 'nothing' then
      return false
    end
    return copy.phase == 'everything' or string.sub(hold[1], 1, #TOKENS) ~= TOKENS
  end)
end

-- The copy's fields, but never over a cancel that the store knows and the copy does not.
local function merged(record, copy)
  if record and record.cancel_requested_at ~= '' then
    copy.fields.cancel_requested_at = record.cancel_requested_at
    copy.fields.cancel_reason = record.cancel_reason
  end
  return copy.fields
end

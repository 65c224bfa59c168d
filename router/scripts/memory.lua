-- The mark of what the server remembers. The first router of a cell makes it; it goes with the server's memory. It has the time when it
-- was made, which is its name, and that of the run of writes that the data comes from: another one after a restart or a failover,
-- when writes that were acknowledged can be missing.

-- The run's name; empty when the server does not tell.
local function run_of_writes()
  local info = redis.pcall and redis.pcall('INFO', 'replication')
  return type(info) == 'string' and string.match(info, 'master_replid:(%x+)') or ''
end

-- Seconds until every router that lives had the time to tell what runs, has ended and was cancelled; 0 when nothing can be missing.
-- Then the names of the mark and of the run. `known`: the mark that the caller knows, empty when it has never seen one: a server
-- without a mark is a new cell to it.
local function unsettled_s(memory, now, settle_s, ttl_s, known)
  local run, mark = run_of_writes(), redis.call('HMGET', memory, 'made', 'run', 'settled_at')
  local made = mark[1] or string.format('%.6f', now)
  local settled_at = tonumber(mark[3] or 0)  -- 0 once it is over: a clock that is set back brings no time back
  local left_s = settled_at - now
  if left_s <= 0 or left_s > settle_s then  -- a longer time comes from a clock that was set back
    left_s = 0
    if settled_at > 0 then
      redis.call('HSET', memory, 'settled_at', '0')
    end
  end
  local lost = known ~= '' and made ~= known
  if mark[2] ~= run or (lost and left_s == 0) then
    left_s = (lost or mark[1]) and settle_s or 0
    redis.call('HSET', memory, 'made', made, 'run', run, 'settled_at', left_s > 0 and string.format('%.6f', now + left_s) or '0')
    redis.call('EXPIRE', memory, ttl_s)
  end
  return left_s, made, run
end

-- Put in front of scripts that count: the next number of a counter, which no restart of the server, and no failover, makes it give twice.
--
-- A server that came back, or became the master, may have forgotten its newest numbers, and all of a counter. So the first number that it
-- gives of one leaps to the milliseconds since the run first counted anything, which is more than any process counted until then.
--
-- marks    HASH first -> "<term of the server that counted first in this run> <milliseconds of its clock>"
--               last <counter> -> term that gave its newest number; where none did yet, the first term counts
-- A term is the run_id of a server, which each start changes, and its replication id, which each promotion changes.

local function above(marks, name, stored)
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    .. string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
  local clock = redis.call('TIME')
  local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  local mark = redis.call('HGET', marks, 'first')
  if not mark then
    mark = string.format('%s %.0f', server, now)
    redis.call('HSET', marks, 'first', mark)
  end
  local first, began = string.match(mark, '^(%x+) (%d+)$')
  local last = redis.call('HGET', marks, 'last ' .. name) or first
  redis.call('HSET', marks, 'last ' .. name, server)
  return last == server and stored + 1 or math.max(stored + 1, now - tonumber(began))
end

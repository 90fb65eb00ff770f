-- Put in front of scripts that count: the next number of a counter, which no restart of the server makes it give twice.
--
-- A server that came back may have forgotten its newest numbers, and all of a counter. So the first number that it gives of one leaps
-- to the milliseconds since the run first counted anything, which is more than anybody counted until then.
--
-- marks    HASH first -> "<run_id of the server that counted first in this run> <milliseconds of its clock>"
--               last <counter> -> run_id of the server that gave its newest number; where it gave none yet, the first server counts

local function above(marks, name, stored)
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
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

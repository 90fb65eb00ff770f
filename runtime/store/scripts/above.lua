-- above
-- Put in front of scripts that count: the next number of a counter, which no restart of the server makes it give twice.
--
-- A server that came back may have forgotten its newest numbers. Its first one leaps to the milliseconds since the counter began, which
-- is more than anybody counted until then. One that forgot that it ever counted begins at 1.
--
-- marks    HASH name -> "<run_id of the server that counted last> <milliseconds of its clock when the counter began>"

local function above(marks, name, stored)
  local server = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
  local clock = redis.call('TIME')
  local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  local last, began = string.match(redis.call('HGET', marks, name) or '', '^(%x+) (%d+)$')
  if last == server then
    return stored + 1
  end
  began = began or string.format('%.0f', now)
  redis.call('HSET', marks, name, server .. ' ' .. began)
  return math.max(stored + 1, now - tonumber(began))
end

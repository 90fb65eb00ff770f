-- Put in front of every script that changes something: a call whose reply was lost is sent again, but takes effect once.
--
-- KEYS[1]  STRING rubato:{run}:op:<client>:<slot>  "<number>:<reply>" of the newest call in this slot; expires
-- ARGV[1]  the number of this call; a slot has one call at a time, and numbers rise
--
-- Replies kept this way are integers. `replay` returns the kept one (nil: not run yet), `answer` keeps and returns one.

local KEPT_S = 900 -- far longer than any client goes on retrying

local function answer(reply)
  redis.call('SET', KEYS[1], ARGV[1] .. ':' .. string.format('%.0f', reply), 'EX', KEPT_S)
  return reply
end

local function replay()
  local number, reply = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+):(.*)$')
  if number == ARGV[1] then
    -- Written once more: WAIT of newer servers takes a connection that wrote nothing for one whose writes have all arrived.
    -- DEL needs no memory, see room.lua.
    redis.call('DEL', KEYS[1])
    return answer(tonumber(reply))
  end
  if number and tonumber(number) > tonumber(ARGV[1]) then
    return redis.error_reply('ABANDONED the caller has gone on to another call')
  end
  return nil
end

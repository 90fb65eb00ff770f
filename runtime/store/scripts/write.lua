-- Store.write: set or delete keys, and append to a stream, in one step.
--
-- KEYS[1]  STRING op slot, see once.lua
-- KEYS[2]  HASH   rubato:{run}:keys           key -> value
-- KEYS[3]  ZSET   rubato:{run}:index          every key of that hash with score 0, for prefix scans in byte order
-- KEYS[4]  HASH   rubato:{run}:fences         see fence.lua
-- KEYS[5]  HASH   rubato:{run}:streams        stream name -> index of its newest entry; absent where nothing is appended
-- KEYS[6]  STREAM rubato:{run}:stream:<name>  entry ids are 0-<index>, one field "v"
-- ARGV     number, fence name, fence token, turn, anew, how many changes, (key, "1" to set or "0" to delete, value) for each change;
--          where something is appended: stream name, index of the first entry, index up to which entries are forgotten, entries

local done = replay()
if done then
  return done
end
local refused = fenced(KEYS[4])
if refused then
  return refused
end
local after = 7 + 3 * tonumber(ARGV[6])
for at = 7, after - 1, 3 do
  if ARGV[at + 1] == '1' then
    redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 2])
    redis.call('ZADD', KEYS[3], 0, ARGV[at])
  else
    redis.call('HDEL', KEYS[2], ARGV[at])
    redis.call('ZREM', KEYS[3], ARGV[at])
  end
end
if KEYS[5] then
  local first = tonumber(ARGV[after + 1])
  if tonumber(redis.call('HGET', KEYS[5], ARGV[after]) or '0') >= first then
    -- A stream's ids only rise, so one that loses its newest entries is made anew.
    local kept = redis.call('XRANGE', KEYS[6], '-', string.format('0-%.0f', first - 1))
    redis.call('DEL', KEYS[6])
    for _, entry in ipairs(kept) do
      redis.call('XADD', KEYS[6], entry[1], 'v', entry[2][2])
    end
  end
  for at = after + 3, #ARGV do
    redis.call('XADD', KEYS[6], string.format('0-%.0f', first + at - after - 3), 'v', ARGV[at])
  end
  redis.call('HSET', KEYS[5], ARGV[after], string.format('%.0f', first + #ARGV - after - 3))
  redis.call('XTRIM', KEYS[6], 'MINID', string.format('0-%.0f', tonumber(ARGV[after + 2]) + 1))
end
return answer(1)

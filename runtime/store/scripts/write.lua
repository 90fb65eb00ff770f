-- Store.write: set or delete keys in one step.
--
-- KEYS[1]  STRING op slot, see once.lua
-- KEYS[2]  HASH   rubato:{run}:keys    key -> value
-- KEYS[3]  ZSET   rubato:{run}:index   every key of that hash with score 0, for prefix scans in byte order
-- KEYS[4]  HASH   rubato:{run}:fences  see fence.lua
-- ARGV     number, fence name, fence token, then (key, "1" to set or "0" to delete, value) for each change

local done = replay()
if done then
  return done
end
local refused = fenced(KEYS[4])
if refused then
  return refused
end
for at = 4, #ARGV, 3 do
  if ARGV[at + 1] == '1' then
    redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 2])
    redis.call('ZADD', KEYS[3], 0, ARGV[at])
  else
    redis.call('HDEL', KEYS[2], ARGV[at])
    redis.call('ZREM', KEYS[3], ARGV[at])
  end
end
return answer(1)

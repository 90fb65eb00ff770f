-- Store.compare_and_set: set one key where it holds what the caller expects; 1 when it was set, else 0.
--
-- KEYS[1]  STRING op slot, see once.lua
-- KEYS[2]  HASH   rubato:{run}:keys    key -> value
-- KEYS[3]  ZSET   rubato:{run}:index   every key of that hash with score 0
-- KEYS[4]  HASH   rubato:{run}:fences  see fence.lua
-- ARGV     number, fence name, fence token, "", "", key, "1" when a value is expected and "0" for absent, expected, value

local done = replay()
if done then
  return done
end
local refused = fenced(KEYS[4])
if refused then
  return refused
end
local stored = redis.call('HGET', KEYS[2], ARGV[6])
if (ARGV[7] == '0' and stored) or (ARGV[7] == '1' and stored ~= ARGV[8]) then
  return answer(0)
end
redis.call('HSET', KEYS[2], ARGV[6], ARGV[9])
redis.call('ZADD', KEYS[3], 0, ARGV[6])
return answer(1)

-- Store.release: give a live lease up; 1 when the token held it, else 0. The token stays known.
--
-- KEYS[1]  STRING op slot, see once.lua
-- KEYS[2]  HASH   rubato:{run}:lease:tokens  lease name -> highest token that ever held it
-- KEYS[3]  HASH   rubato:{run}:lease:values  lease name -> what its newest holder wrote
-- KEYS[4]  ZSET   rubato:{run}:lease:until   lease name -> when it lapses, in microseconds of the server's clock
-- ARGV     number, name, token

local done = replay()
if done then
  return done
end
despite_want_of_memory(KEYS[2])
local now = redis.call('TIME')
local lapses = redis.call('ZSCORE', KEYS[4], ARGV[2])
if redis.call('HGET', KEYS[2], ARGV[2]) ~= ARGV[3] or not lapses or tonumber(lapses) <= now[1] * 1000000 + now[2] then
  return answer(0)
end
redis.call('HDEL', KEYS[3], ARGV[2])
redis.call('ZREM', KEYS[4], ARGV[2])
return answer(1)

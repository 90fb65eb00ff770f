-- Store.increment: max(the next number, at least), stored and returned; "NOTANUMBER" where the key holds something else.
--
-- KEYS[1]  STRING op slot, see once.lua
-- KEYS[2]  HASH   rubato:{run}:keys   key -> value
-- KEYS[3]  ZSET   rubato:{run}:index  every key of that hash with score 0
-- KEYS[4]  HASH   rubato:{run}:marks  see above.lua
-- ARGV     number, key, at least

local done = replay()
if done then
  return done
end
despite_want_of_memory(KEYS[2])
local number = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or '0')
if not number then
  return redis.error_reply('NOTANUMBER 0')
end
number = math.max(above(KEYS[4], ARGV[2], number), tonumber(ARGV[3]))
redis.call('HSET', KEYS[2], ARGV[2], string.format('%.0f', number))
redis.call('ZADD', KEYS[3], 0, ARGV[2])
return answer(number)

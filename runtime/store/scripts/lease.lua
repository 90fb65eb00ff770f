-- Store.lease: take or renew a lease; 1, or 0 when a higher token was seen. Sent again, it only renews.
--
-- KEYS[1]  HASH rubato:{run}:lease:tokens  lease name -> highest token that ever held it
-- KEYS[2]  HASH rubato:{run}:lease:values  lease name -> what its newest holder wrote
-- KEYS[3]  ZSET rubato:{run}:lease:until   lease name -> when it lapses, in microseconds of the server's clock
-- ARGV     name, token, value, time to live in microseconds

local seen = redis.call('HGET', KEYS[1], ARGV[1])
if seen and tonumber(ARGV[2]) < tonumber(seen) then
  return 0
end
despite_want_of_memory(KEYS[1])
local now = redis.call('TIME')
local lapses = now[1] * 1000000 + now[2] + ARGV[4]
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[3], string.format('%.0f', lapses), ARGV[1])
return 1

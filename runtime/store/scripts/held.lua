-- Store.held: {token, value, microseconds left} of a live lease; empty where there is none of that name. Changes nothing.
--
-- KEYS[1]  HASH rubato:{run}:lease:tokens  lease name -> highest token that ever held it
-- KEYS[2]  HASH rubato:{run}:lease:values  lease name -> what its newest holder wrote
-- KEYS[3]  ZSET rubato:{run}:lease:until   lease name -> when it lapses, in microseconds of the server's clock
-- ARGV     name

local time = redis.call('TIME')
local left = (redis.call('ZSCORE', KEYS[3], ARGV[1]) or 0) - (time[1] * 1000000 + time[2])
if left <= 0 then
  return {}
end
return { redis.call('HGET', KEYS[1], ARGV[1]), redis.call('HGET', KEYS[2], ARGV[1]), left }

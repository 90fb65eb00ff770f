-- Store.leases: {name, token, value, microseconds left, ...} of the live leases with a prefix. Changes nothing.
--
-- KEYS[1]  HASH rubato:{run}:lease:tokens  lease name -> highest token that ever held it
-- KEYS[2]  HASH rubato:{run}:lease:values  lease name -> what its newest holder wrote
-- KEYS[3]  ZSET rubato:{run}:lease:until   lease name -> when it lapses, in microseconds of the server's clock
-- ARGV     prefix

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local live = redis.call('ZRANGEBYSCORE', KEYS[3], string.format('(%.0f', now), '+inf', 'WITHSCORES')
local found = {}
for at = 1, #live, 2 do
  if string.sub(live[at], 1, #ARGV[1]) == ARGV[1] then
    found[#found + 1] = live[at]
    found[#found + 1] = redis.call('HGET', KEYS[1], live[at])
    found[#found + 1] = redis.call('HGET', KEYS[2], live[at])
    found[#found + 1] = live[at + 1] - now
  end
end
return found

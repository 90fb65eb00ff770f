-- Store.holders: {name, token, ...} of the live leases with a prefix. Changes nothing.
--
-- KEYS[1]  HASH rubato:{run}:lease:tokens  lease name -> highest token that ever held it
-- KEYS[2]  HASH rubato:{run}:lease:values  lease name -> what its newest holder wrote
-- KEYS[3]  ZSET rubato:{run}:lease:until   lease name -> when it lapses, in microseconds of the server's clock
-- ARGV     prefix

local time = redis.call('TIME')
local live = redis.call('ZRANGEBYSCORE', KEYS[3], string.format('(%.0f', time[1] * 1000000 + time[2]), '+inf')
local found = {}
for _, name in ipairs(live) do
  if string.sub(name, 1, #ARGV[1]) == ARGV[1] then
    found[#found + 1] = name
    found[#found + 1] = redis.call('HGET', KEYS[1], name)
  end
end
return found

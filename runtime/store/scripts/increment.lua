-- KEYS[1] …:kv  HASH  key -> value
-- ARGV: key, at least
local number = math.max(tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0') + 1, tonumber(ARGV[2]))
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', number))
return number

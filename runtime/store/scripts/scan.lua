-- Store.scan: {key, value, key, value, ...} of every key with a prefix, in byte order. Changes nothing.
--
-- KEYS[1]  HASH rubato:{run}:keys   key -> value
-- KEYS[2]  ZSET rubato:{run}:index  every key of that hash with score 0
-- ARGV     prefix

local found = {}
for _, key in ipairs(redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[1], '[' .. ARGV[1] .. '\255')) do
  found[#found + 1] = key
  found[#found + 1] = redis.call('HGET', KEYS[1], key)
end
return found

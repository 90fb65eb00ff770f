-- Entry n of a stream has the id n-0, so a reader's cursor is a plain number.
-- KEYS[1] …:stream:NAME  STREAM  entries, field v
-- KEYS[2] …:kv           HASH    'stream:NAME' -> last index
-- ARGV: index key, value, limit
local n = redis.call('HINCRBY', KEYS[2], ARGV[1], 1)
redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[3], string.format('%.0f-0', n), 'v', ARGV[2])
return n

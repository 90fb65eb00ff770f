-- Leases, on the server's clock alone.
-- KEYS[1] …:leases   HASH  name -> value
-- KEYS[2] …:tokens   HASH  name -> highest token seen
-- KEYS[3] …:expiry   ZSET  name -> expiry, ms since the epoch; absent once released
-- ARGV: verb, name (list: prefix), token, value, ttl in ms
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local verb, name = ARGV[1], ARGV[2]
if verb == 'list' then
  local found = {}
  for _, held in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. now, '+inf')) do
    if string.sub(held, 1, #name) == name then
      local left = tonumber(redis.call('ZSCORE', KEYS[3], held)) - now
      local row = {held, redis.call('HGET', KEYS[2], held), redis.call('HGET', KEYS[1], held), string.format('%.0f', left)}
      table.insert(found, row)
    end
  end
  return found
end
local token, seen = tonumber(ARGV[3]), tonumber(redis.call('HGET', KEYS[2], name) or '-1')
if verb == 'lease' then
  if token < seen then return 0 end
  redis.call('HSET', KEYS[1], name, ARGV[4])
  redis.call('HSET', KEYS[2], name, ARGV[3])
  redis.call('ZADD', KEYS[3], now + tonumber(ARGV[5]), name)
  return 1
end
local expiry = tonumber(redis.call('ZSCORE', KEYS[3], name) or '0')
if token ~= seen or expiry <= now then return 0 end
redis.call('ZREM', KEYS[3], name)
redis.call('HDEL', KEYS[1], name)
return 1

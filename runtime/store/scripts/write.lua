-- Set and delete keys in one step, unless the writer was replaced.
-- KEYS[1] …:kv      HASH  key -> value
-- KEYS[2] …:fences  HASH  fence name -> highest token seen
-- ARGV: fence name ('' for none), fence token, mode ('write' or 'cas'), then
--   write: num sets, (key, value)…, keys to delete…
--   cas:   key, expected present ('1'/'0'), expected, value
-- Returns 1 when done, 0 when a compare failed, -1 when fenced.
if ARGV[1] ~= '' then
  local newest = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0')
  if tonumber(ARGV[2]) < newest then return -1 end
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
end
if ARGV[3] == 'cas' then
  local held = redis.call('HGET', KEYS[1], ARGV[4])
  if held == ARGV[7] then return 1 end -- a retry after a lost reply
  if ARGV[5] == '1' and held ~= ARGV[6] then return 0 end
  if ARGV[5] == '0' and held then return 0 end
  redis.call('HSET', KEYS[1], ARGV[4], ARGV[7])
  return 1
end
local sets = tonumber(ARGV[4])
for i = 1, sets do redis.call('HSET', KEYS[1], ARGV[3 + 2 * i], ARGV[4 + 2 * i]) end
for i = 5 + 2 * sets, #ARGV do redis.call('HDEL', KEYS[1], ARGV[i]) end
return 1

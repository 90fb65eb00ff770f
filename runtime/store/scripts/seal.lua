-- WorkSet.seal: make a held group ready; 1, or 0 when it is not held whole.
--
-- KEYS     see workset.lua; uses held, ready, fates, group:<group>
-- ARGV     number, fence name, fence token, group, fate, fewest items

local done = replay()
if done then
  return done
end
local refused = fenced(KEYS[3])
if refused then
  return refused
end
local score = redis.call('ZSCORE', HELD, ARGV[4])
local num = redis.call('HLEN', group_key(ARGV[4]))
if not score or num < tonumber(ARGV[6]) then
  return answer(0)
end
redis.call('ZREM', HELD, ARGV[4])
redis.call('ZADD', READY, score, ARGV[4])
redis.call('HSET', FATES, ARGV[4], ARGV[5])
redis.call('HINCRBY', SET, 'held', -num)
return answer(1)

-- WorkSet.seal: make a held group ready; 1, or 0 when it is not held.
--
-- KEYS     see workset.lua; uses held, ready, fates, group:<group>
-- ARGV     number, group, fate

local done = replay()
if done then
  return done
end
local score = redis.call('ZSCORE', HELD, ARGV[2])
if not score then
  return answer(0)
end
redis.call('ZREM', HELD, ARGV[2])
redis.call('ZADD', READY, score, ARGV[2])
redis.call('HSET', FATES, ARGV[2], ARGV[3])
redis.call('HINCRBY', SET, 'held', -redis.call('HLEN', group_key(ARGV[2])))
return answer(1)

-- WorkSet.put: hold an item in its group; 1 when it is new, 0 for a duplicate. Its group being sealed, it ends "late".
--
-- KEYS     see workset.lua; uses seen, held, fates, group:<group>, notes, log
-- ARGV     number, fence name, fence token, id, group, score, "<score>:<payload>", note

local done = replay()
if done then
  return done
end
local refused = fenced(KEYS[3])
if refused then
  return refused
end
if redis.call('SADD', SEEN, ARGV[4]) == 0 then
  return answer(0)
end
if redis.call('HEXISTS', FATES, ARGV[5]) == 1 then
  log_ends({ ARGV[4] }, { ARGV[8] }, ARGV[5], 'late', 0, 0)
  return answer(1)
end
redis.call('HSET', group_key(ARGV[5]), ARGV[4], ARGV[7])
redis.call('ZADD', HELD, 'LT', ARGV[6], ARGV[5])
redis.call('HINCRBY', SET, 'held', 1)
if ARGV[8] ~= '' then
  redis.call('HSET', NOTES, ARGV[4], ARGV[8])
end
return answer(1)

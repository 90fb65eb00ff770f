-- WorkSet.put: hold an item in its group; 1 when it is new, 0 for a duplicate. Its group being sealed, it ends "late".
--
-- KEYS     see workset.lua; uses seen, held, fates, group:<group>, notes, log
-- ARGV     number, id, group, score, "<score>:<payload>", note

local done = replay()
if done then
  return done
end
if redis.call('SADD', SEEN, ARGV[2]) == 0 then
  return answer(0)
end
if redis.call('HEXISTS', FATES, ARGV[3]) == 1 then
  log_end(ARGV[2], ARGV[3], 'late', 0, 0, ARGV[6])
  return answer(1)
end
redis.call('HSET', group_key(ARGV[3]), ARGV[2], ARGV[5])
redis.call('ZADD', HELD, 'LT', ARGV[4], ARGV[3])
redis.call('HINCRBY', SET, 'held', 1)
if ARGV[6] ~= '' then
  redis.call('HSET', NOTES, ARGV[2], ARGV[6])
end
return answer(1)

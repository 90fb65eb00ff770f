-- WorkSet.end: log an item that was never held; 1 when its id is new, else 0.
--
-- KEYS     see workset.lua; uses seen, log
-- ARGV     number, id, group, fate, note

local done = replay()
if done then
  return done
end
if redis.call('SADD', SEEN, ARGV[2]) == 0 then
  return answer(0)
end
log_end(ARGV[2], ARGV[3], ARGV[4], 0, 0, ARGV[5])
return answer(1)

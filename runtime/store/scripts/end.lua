-- WorkSet.end: log an item that was never held; 1 when its id is new, else 0.
--
-- KEYS     see workset.lua; uses seen, log
-- ARGV     number, fence name, fence token, id, group, fate, note

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
log_ends({ ARGV[4] }, { ARGV[7] }, ARGV[5], ARGV[6], 0, 0)
return answer(1)

-- WorkSet.discard: end every item of a held or ready group; how many, 0 for any other group.
--
-- KEYS     see workset.lua; uses held, ready, fates, group:<group>, notes, log
-- ARGV     number, fence name, fence token, group, fate

local done = replay()
if done then
  return done
end
local refused = fenced(KEYS[3])
if refused then
  return refused
end
local was_held = redis.call('ZREM', HELD, ARGV[4]) == 1
if not was_held and redis.call('ZREM', READY, ARGV[4]) == 0 then
  return answer(0)
end
local num = end_group(ARGV[4], ARGV[5], 0, 0)
if was_held then
  redis.call('HINCRBY', SET, 'held', -num)
end
return answer(num)

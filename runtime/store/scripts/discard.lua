-- WorkSet.discard: end every item of a held or ready group; how many, 0 for any other group.
--
-- KEYS     see workset.lua; uses held, ready, fates, group:<group>, notes, log
-- ARGV     number, group, fate

local done = replay()
if done then
  return done
end
local was_held = redis.call('ZREM', HELD, ARGV[2]) == 1
if not was_held and redis.call('ZREM', READY, ARGV[2]) == 0 then
  return answer(0)
end
local num = end_group(ARGV[2], ARGV[3], 0, 0)
if was_held then
  redis.call('HINCRBY', SET, 'held', -num)
end
return answer(num)

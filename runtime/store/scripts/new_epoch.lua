-- WorkSet.new_epoch: max(the next number, at least), stored and returned.
--
-- KEYS     see workset.lua
-- KEYS[4]  HASH   rubato:{run}:marks  see above.lua
-- ARGV     number, fence name, fence token, at least

local done = replay()
if done then
  return done
end
local refused = fenced(KEYS[3])
if refused then
  return refused
end
local epoch = math.max(above(KEYS[4], SET, counter('epoch')), tonumber(ARGV[4]))
redis.call('HSET', SET, 'epoch', string.format('%.0f', epoch))
return answer(epoch)

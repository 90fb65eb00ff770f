-- WorkSet.new_epoch: max(newest + 1, at least), stored and returned.
--
-- KEYS     see workset.lua
-- ARGV     number, at least

local done = replay()
if done then
  return done
end
local epoch = math.max(counter('epoch') + 1, tonumber(ARGV[2]))
redis.call('HSET', SET, 'epoch', string.format('%.0f', epoch))
return answer(epoch)

-- WorkSet.commit: end every item bound to the next step; how many, 0 for a step that was committed already.
--
-- KEYS     see workset.lua; uses steps, step:<step>, fates, group:<group>, notes, log
-- ARGV     number, fence name, fence token, step, epoch

local done = replay()
if done then
  return done
end
local refused = fenced(KEYS[3])
if refused then
  return refused
end
local newest, committed, step = counter('epoch'), counter('committed'), tonumber(ARGV[4])
if tonumber(ARGV[5]) < newest then
  return redis.error_reply(string.format('STALE_EPOCH %.0f', newest))
end
if step <= committed then
  return answer(0)
end
if step ~= committed + 1 then
  return redis.error_reply(string.format('SKIPPED %.0f', committed))
end
local num = 0
for _, group in ipairs(redis.call('ZRANGE', step_key(ARGV[4]), 0, -1)) do
  num = num + end_group(group, redis.call('HGET', FATES, group), ARGV[4], ARGV[5])
end
redis.call('DEL', step_key(ARGV[4]))
redis.call('ZREM', STEPS, ARGV[4])
redis.call('HINCRBY', SET, 'bound', 0 - num) -- -0 is no integer to Redis
redis.call('HSET', SET, 'committed', ARGV[4], 'epoch', ARGV[5])
return answer(num)

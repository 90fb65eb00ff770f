-- WorkSet.claim: drop ready groups below a score, then bind the oldest ones to a step, or none when too few are ready.
-- Returns {ready groups left, {dropped groups}, {group, {id, ...}, {note, ...}, group, ...}}. Payloads stay bound to the step until
-- it is committed, so the caller reads them afterwards: by way of Lua each would be copied twice.
--
-- KEYS     see workset.lua; uses everything but seen and held
-- KEYS[4]  STRING <op slot>:dropped  cmsgpack of what this call dropped, for a call whose reply was lost; expires
-- ARGV     number, fence name, fence token, num, lowest score, step, epoch

local function report(dropped)
  local groups = {}
  for _, group in ipairs(redis.call('ZRANGE', step_key(ARGV[6]), 0, -1)) do
    local ids = ids_of(group)
    groups[#groups + 1] = group
    groups[#groups + 1] = ids
    groups[#groups + 1] = notes_of(ids)
  end
  return { redis.call('ZCARD', READY), dropped, groups }
end

local done = replay()
if done and done ~= 1 then
  return done
end
if done then
  local kept = redis.call('GET', KEYS[4])
  return report(kept and cmsgpack.unpack(kept) or {})
end
local refused = fenced(KEYS[3])
if refused then
  return refused
end
local newest, committed = counter('epoch'), counter('committed')
if tonumber(ARGV[7]) < newest then
  return redis.error_reply(string.format('STALE_EPOCH %.0f', newest))
end
if tonumber(ARGV[6]) <= committed then
  return redis.error_reply(string.format('CLAIMED_LATE %.0f', committed))
end
local is_bound = redis.call('EXISTS', step_key(ARGV[6])) == 1
local follows = tonumber(ARGV[6]) == committed + 1 or redis.call('EXISTS', step_key(string.format('%.0f', ARGV[6] - 1))) == 1
if not is_bound and not follows then
  return redis.error_reply(string.format('CLAIMED_EARLY %.0f', committed))
end
redis.call('HSET', SET, 'epoch', ARGV[7])
if is_bound then
  return report({})
end
local dropped = redis.call('ZRANGEBYSCORE', READY, '-inf', '(' .. ARGV[5])
for _, group in ipairs(dropped) do
  redis.call('ZREM', READY, group)
  end_group(group, 'stale', 0, 0)
end
if redis.call('ZCARD', READY) >= tonumber(ARGV[4]) then
  local oldest = redis.call('ZRANGE', READY, 0, ARGV[4] - 1, 'WITHSCORES')
  for at = 1, #oldest, 2 do
    redis.call('ZREM', READY, oldest[at])
    redis.call('ZADD', step_key(ARGV[6]), oldest[at + 1], oldest[at])
    redis.call('HINCRBY', SET, 'bound', redis.call('HLEN', group_key(oldest[at])))
  end
  redis.call('ZADD', STEPS, ARGV[6], ARGV[6])
end
if #dropped > 0 then
  redis.call('SET', KEYS[4], cmsgpack.pack(dropped), 'EX', KEPT_S)
else
  redis.call('DEL', KEYS[4])
end
answer(1)
return report(dropped)

-- Put behind once.lua in front of scripts that write keys.
--
-- fences   HASH rubato:{run}:fences  fence name -> "<highest token that ever wrote under it> <number of its newest write>"
-- ARGV[2]  fence name, ARGV[3] its token; a token of "" means that the write is not fenced
-- ARGV[4]  number of this write under the token ("": not numbered), ARGV[5] what its writer takes the fence's value for
--
-- `fenced` returns nil where the write is to be made, 0 where this very write was made before, and an error reply "FENCED <newest token>" for a
-- zombie, or "FORGOTTEN <number>" where the fence has another value than its writer believes.

local function fenced(fences)
  if ARGV[3] == '' then
    return nil
  end
  local stored = redis.call('HGET', fences, ARGV[2]) or '0 0'
  local newest = string.match(stored, '^(%d+) ')
  if tonumber(ARGV[3]) < tonumber(newest) then
    return redis.error_reply('FENCED ' .. newest)
  end
  if ARGV[4] == '' then
    if ARGV[3] ~= newest then
      redis.call('HSET', fences, ARGV[2], ARGV[3] .. ' 0')
    end
    return nil
  end
  local mine = ARGV[3] .. ' ' .. ARGV[4]
  if stored == mine then
    redis.call('HSET', fences, ARGV[2], mine) -- written once more, see once.lua
    return 0
  end
  if stored ~= ARGV[5] then
    return redis.error_reply('FORGOTTEN ' .. ARGV[4])
  end
  redis.call('HSET', fences, ARGV[2], mine)
  return nil
end

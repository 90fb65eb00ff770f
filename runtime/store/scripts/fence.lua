-- Put behind once.lua in front of scripts that write keys or change a workset.
--
-- fences   HASH rubato:{run}:fences  fence name -> highest token that ever wrote under it
-- ARGV[2]  fence name, ARGV[3] its token; a token of "" means that the write is not fenced
--
-- `fenced` returns an error reply "FENCED <newest>" for a zombie, else remembers the token and returns nil.

local function fenced(fences)
  if ARGV[3] == '' then
    return nil
  end
  local newest = redis.call('HGET', fences, ARGV[2])
  if newest and tonumber(ARGV[3]) < tonumber(newest) then
    return redis.error_reply('FENCED ' .. newest)
  end
  if newest ~= ARGV[3] then
    redis.call('HSET', fences, ARGV[2], ARGV[3])
  end
  return nil
end

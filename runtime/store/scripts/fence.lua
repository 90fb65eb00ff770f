-- Put behind once.lua in front of scripts that write keys.
--
-- KEYS[4]  HASH rubato:{run}:fences  fence name -> highest token that ever wrote under it
-- ARGV[2]  fence name, ARGV[3] its token; a token of "" means that the write is not fenced
--
-- `fenced` returns an error reply "FENCED <newest>" for a zombie, else remembers the token and returns nil.

local function fenced()
  if ARGV[3] == '' then
    return nil
  end
  local newest = redis.call('HGET', KEYS[4], ARGV[2])
  if newest and tonumber(ARGV[3]) < tonumber(newest) then
    return redis.error_reply('FENCED ' .. newest)
  end
  redis.call('HSET', KEYS[4], ARGV[2], ARGV[3])
  return nil
end

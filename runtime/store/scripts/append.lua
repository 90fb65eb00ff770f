-- Store.append: add an entry to a stream and return its index; only the newest `limit` entries stay.
--
-- KEYS[1]  STRING op slot, see once.lua
-- KEYS[2]  HASH   rubato:{run}:streams        stream name -> index of its newest entry
-- KEYS[3]  STREAM rubato:{run}:stream:<name>  entry ids are 0-<index>, one field "v"
-- ARGV     number, stream name, value, limit

local done = replay()
if done then
  return done
end
despite_want_of_memory(KEYS[2])
local index = redis.call('HINCRBY', KEYS[2], ARGV[2], 1)
redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[4], string.format('0-%.0f', index), 'v', ARGV[3])
return answer(index)

-- Store.read: {id, value, id, value, ...} of the entries from an index on. Changes nothing.
--
-- KEYS[1]  STREAM rubato:{run}:stream:<name>  entry ids are 0-<index>, one field "v"
-- ARGV     first id, most entries

local found = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
  found[#found + 1] = entry[1]
  found[#found + 1] = entry[2][2]
end
return found

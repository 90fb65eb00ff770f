-- WorkSet.trim: forget the log entries before an index, and their ids. Sent again, it changes nothing more.
--
-- KEYS[1]  STREAM rubato:{run}:ws:<name>:log   see workset.lua
-- KEYS[2]  SET    rubato:{run}:ws:<name>:seen
-- ARGV     last id that goes, first id that stays

for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', ARGV[1])) do
  redis.call('SREM', KEYS[2], entry[2][2])
end
return redis.call('XTRIM', KEYS[1], 'MINID', ARGV[2])

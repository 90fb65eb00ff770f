-- WorkSet.trim: forget the log entries before an index. Sent again, it changes nothing more.
--
-- KEYS[1]  STREAM rubato:{run}:ws:<name>:log  see workset.lua
-- ARGV     first id that stays

return redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])

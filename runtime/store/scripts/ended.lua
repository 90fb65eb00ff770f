-- WorkSet.ended: {{id, {field, value, ...}}, ...} of the log from an index on. Changes nothing.
--
-- KEYS[1]  STREAM rubato:{run}:ws:<name>:log  see workset.lua
-- ARGV     first id, most entries

return redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])

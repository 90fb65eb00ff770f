-- WorkSet.members: the ids of a group's live items, in no order. Changes nothing.
--
-- KEYS[1]  HASH rubato:{run}:ws:<name>:group:<group>  see workset.lua
-- ARGV     none

return redis.call('HKEYS', KEYS[1])

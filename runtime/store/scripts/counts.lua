-- WorkSet.counts: {held, ready, bound, ended, committed, epoch, {bound steps}}. Changes nothing.
--
-- KEYS     see workset.lua; KEYS[1] is not used
-- ARGV     none

return {
  counter('held'),
  redis.call('ZCARD', READY),
  counter('bound'),
  counter('ended'),
  counter('committed'),
  counter('epoch'),
  redis.call('ZRANGE', STEPS, 0, -1),
}

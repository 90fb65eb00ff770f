-- One durable set of work items; every verb is one atomic step. The twin of runtime/store/memory_workset.py.
-- KEYS[1]  P           prefix of all keys below (one hash slot)
--   P:seen     SET   every id that was ever put or ended
--   P:payload  HASH  id -> payload           (live items)
--   P:note     HASH  id -> note              (live items)
--   P:score    HASH  id -> score             (live items)
--   P:fate     HASH  group -> fate           (sealed groups)
--   P:ready    ZSET  group -> lowest score   (sealed, not bound)
--   P:bound    ZSET  group -> step           (bound groups)
--   P:low      HASH  group -> lowest score   (bound groups: the order they were claimed in)
--   P:meta     HASH  committed, epoch, ended, live
--   P:log      LIST  MessagePack {index, id, group, fate, step, epoch, note}, oldest first
--   P:g:GROUP  SET   ids of a live group
-- ARGV[1] verb, then its arguments. Errors: {-1, newest epoch} stale epoch, {-2, committed} out of order.
local P = KEYS[1]
local function key(name) return P .. ':' .. name end
local function meta(name) return tonumber(redis.call('HGET', key('meta'), name) or '0') end
local function set(name, value) redis.call('HSET', key('meta'), name, string.format('%.0f', value)) end

local function log(id, group, fate, step, epoch, note)
  local index = redis.call('HINCRBY', key('meta'), 'ended', 1)
  redis.call('RPUSH', key('log'), cmsgpack.pack({index, id, group, fate, step, epoch, note}))
end

local function members(group)
  local ids = redis.call('SMEMBERS', key('g:' .. group))
  table.sort(ids)
  return ids
end

local function end_group(group, fate, step, epoch)
  local ids = members(group)
  for _, id in ipairs(ids) do
    log(id, group, fate, step, epoch, redis.call('HGET', key('note'), id))
    redis.call('HDEL', key('payload'), id)
    redis.call('HDEL', key('note'), id)
    redis.call('HDEL', key('score'), id)
  end
  redis.call('HINCRBY', key('meta'), 'live', -#ids)
  redis.call('DEL', key('g:' .. group))
  redis.call('HDEL', key('fate'), group)
  redis.call('HDEL', key('low'), group)
  redis.call('ZREM', key('ready'), group)
  redis.call('ZREM', key('bound'), group)
  return #ids
end

local function lowest(group)
  local low
  for _, id in ipairs(members(group)) do
    local score = tonumber(redis.call('HGET', key('score'), id))
    if not low or score < low then low = score end
  end
  return low
end

local function bound_to(step)
  local groups = redis.call('ZRANGEBYSCORE', key('bound'), step, step)
  local low = {}
  for _, group in ipairs(groups) do low[group] = tonumber(redis.call('HGET', key('low'), group)) end
  table.sort(groups, function(a, b) if low[a] ~= low[b] then return low[a] < low[b] end return a < b end)
  return groups
end

local function enter(epoch)
  local newest = meta('epoch')
  if epoch < newest then return {-1, newest} end
  set('epoch', epoch)
end

local function claimed(step, dropped)
  local groups = {}
  for _, group in ipairs(bound_to(step)) do
    local items = {}
    for _, id in ipairs(members(group)) do
      table.insert(items, {id, redis.call('HGET', key('score'), id), redis.call('HGET', key('payload'), id), redis.call('HGET', key('note'), id)})
    end
    table.insert(groups, {group, items})
  end
  return {1, groups, dropped, redis.call('ZCARD', key('ready'))}
end

local verbs = {}

function verbs.put(id, group, score, payload, note)
  if redis.call('SADD', key('seen'), id) == 0 then return 0 end
  if redis.call('HEXISTS', key('fate'), group) == 1 then
    log(id, group, 'late', 0, 0, note)
    return 1
  end
  redis.call('HSET', key('payload'), id, payload)
  redis.call('HSET', key('note'), id, note)
  redis.call('HSET', key('score'), id, score)
  redis.call('SADD', key('g:' .. group), id)
  redis.call('HINCRBY', key('meta'), 'live', 1)
  return 1
end

verbs['end'] = function(id, group, fate, note)
  if redis.call('SADD', key('seen'), id) == 0 then return 0 end
  log(id, group, fate, 0, 0, note)
  return 1
end

function verbs.seal(group, fate)
  if redis.call('EXISTS', key('g:' .. group)) == 0 or redis.call('HEXISTS', key('fate'), group) == 1 then return 0 end
  redis.call('HSET', key('fate'), group, fate)
  redis.call('ZADD', key('ready'), lowest(group), group)
  return 1
end

function verbs.discard(group, fate)
  if redis.call('ZSCORE', key('bound'), group) then return 0 end
  return end_group(group, fate, 0, 0)
end

function verbs.claim(num, min_score, step, epoch)
  num, min_score, step, epoch = tonumber(num), tonumber(min_score), tonumber(step), tonumber(epoch)
  local refused = enter(epoch)
  if refused then return refused end
  if redis.call('ZCOUNT', key('bound'), step, step) > 0 then return claimed(step, {}) end
  if step <= meta('committed') then return {-2, meta('committed')} end
  local dropped = redis.call('ZRANGEBYSCORE', key('ready'), '-inf', '(' .. string.format('%.0f', min_score))
  for _, group in ipairs(dropped) do end_group(group, 'stale', 0, 0) end
  local fresh = redis.call('ZRANGE', key('ready'), 0, num - 1, 'WITHSCORES')
  if #fresh == 2 * num then
    for i = 1, #fresh, 2 do
      redis.call('HSET', key('low'), fresh[i], fresh[i + 1])
      redis.call('ZREM', key('ready'), fresh[i])
      redis.call('ZADD', key('bound'), step, fresh[i])
    end
  end
  return claimed(step, dropped)
end

function verbs.commit(step, epoch)
  step, epoch = tonumber(step), tonumber(epoch)
  local refused = enter(epoch)
  if refused then return refused end
  local committed = meta('committed')
  if step <= committed then return 0 end
  if step ~= committed + 1 then return {-2, committed} end
  set('committed', step)
  local count = 0
  for _, group in ipairs(bound_to(step)) do
    count = count + end_group(group, redis.call('HGET', key('fate'), group), step, epoch)
  end
  return count
end

function verbs.new_epoch(at_least)
  local epoch = math.max(meta('epoch') + 1, tonumber(at_least))
  set('epoch', epoch)
  return epoch
end

function verbs.members(group) return members(group) end

function verbs.ended(after, limit)
  local first = meta('ended') - redis.call('LLEN', key('log'))
  local start = math.max(0, tonumber(after) - first)
  return redis.call('LRANGE', key('log'), start, start + tonumber(limit) - 1)
end

function verbs.trim(through)
  local first = meta('ended') - redis.call('LLEN', key('log'))
  local drop = tonumber(through) - first
  if drop > 0 then redis.call('LTRIM', key('log'), drop, -1) end
  return 1
end

function verbs.counts()
  local bound, steps, seen = 0, {}, {}
  local pairs_ = redis.call('ZRANGE', key('bound'), 0, -1, 'WITHSCORES')
  for i = 1, #pairs_, 2 do
    bound = bound + redis.call('SCARD', key('g:' .. pairs_[i]))
    if not seen[pairs_[i + 1]] then
      seen[pairs_[i + 1]] = true
      table.insert(steps, pairs_[i + 1])
    end
  end
  local ready, in_ready = redis.call('ZRANGE', key('ready'), 0, -1), 0
  for _, group in ipairs(ready) do in_ready = in_ready + redis.call('SCARD', key('g:' .. group)) end
  return {meta('live') - bound - in_ready, #ready, bound, meta('ended'), meta('committed'), meta('epoch'), steps}
end

return verbs[ARGV[1]](unpack(ARGV, 2))

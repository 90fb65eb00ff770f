-- Put behind once.lua and fence.lua in front of every WorkSet script: the keys of a workset, and how a group ends.
--
-- KEYS[1]  STRING op slot, see once.lua
-- KEYS[2]  HASH   rubato:{run}:ws:<name>  held, bound (items), ended (newest log index), committed, epoch
-- KEYS[3]  HASH   rubato:{run}:fences     see fence.lua
-- and, built from KEYS[2], so in the same hash slot:
--   :seen          SET    every id that was put or ended, until its log entry is trimmed
--   :held          ZSET   group -> lowest score of its items; groups not sealed yet
--   :ready         ZSET   group -> lowest score; sealed groups that no step has claimed
--   :fates         HASH   group -> the fate it was sealed with; every ready or bound group
--   :steps         ZSET   step -> step; the steps that have bound groups
--   :step:<step>   ZSET   group -> lowest score; the groups bound to a step
--   :group:<name>  HASH   id -> "<score>:<payload>"; the live items of a group
--   :notes         HASH   id -> note; live items that have one
--   :log           STREAM 0-<index>: id, group, fate, step, epoch, note of each item that ended
--
-- The twin of memory_workset.py: both must give equal results.

local SET = KEYS[2]
local SEEN, HELD, READY = SET .. ':seen', SET .. ':held', SET .. ':ready'
local FATES, STEPS, NOTES, LOG = SET .. ':fates', SET .. ':steps', SET .. ':notes', SET .. ':log'

local function group_key(group)
  return SET .. ':group:' .. group
end

local function step_key(step)
  return SET .. ':step:' .. step
end

local function counter(name)
  return tonumber(redis.call('HGET', SET, name) or '0')
end

-- Lua compares strings by the server's locale; ids are ordered by their bytes everywhere.
local function bytes_before(a, b)
  for at = 1, math.min(#a, #b) do
    local left, right = string.byte(a, at), string.byte(b, at)
    if left ~= right then
      return left < right
    end
  end
  return #a < #b
end

local function ids_of(group)
  local ids = redis.call('HKEYS', group_key(group))
  table.sort(ids, bytes_before)
  return ids
end

local function notes_of(ids)
  local notes = redis.call('HMGET', NOTES, unpack(ids))
  for at = 1, #ids do
    notes[at] = notes[at] or ''
  end
  return notes
end

local function log_ends(ids, notes, group, fate, step, epoch)
  local before = redis.call('HINCRBY', SET, 'ended', #ids) - #ids
  for at, id in ipairs(ids) do
    local index = string.format('0-%.0f', before + at)
    redis.call('XADD', LOG, index, 'id', id, 'group', group, 'fate', fate, 'step', step, 'epoch', epoch, 'note', notes[at])
  end
end

-- Ends every item of a group that the caller took out of held, ready or its step; returns how many.
local function end_group(group, fate, step, epoch)
  local ids = ids_of(group)
  log_ends(ids, notes_of(ids), group, fate, step, epoch)
  redis.call('HDEL', NOTES, unpack(ids))
  redis.call('DEL', group_key(group))
  redis.call('HDEL', FATES, group)
  return #ids
end

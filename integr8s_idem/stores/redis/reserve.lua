-- Ask for many keys at once.
-- KEYS   record keys
-- ARGV   for each key a wish: lease in ms (6 bytes), retention in ms (6), flags (1), fingerprint, trace,
--        checks (8), token (16), owner; see codec.py
-- Answer {now in µs, answer per key}; an answer is
--        0            it was absent and is yours: attempt 1, fence = now
--        1            the key holds another Redis type
--        2            not looked at, this answer is long enough: ask again
--        a string     the record as it stands after this call
local call, pcall = redis.call, redis.pcall
local byte, char, sub = string.byte, string.char, string.sub
local pack, unpack, bxor = struct.pack, struct.unpack, bit.bxor
local LONG_ENOUGH = 4194304
local EXTRAS = {[0] = 0, 16, 24, 40} -- bytes of fingerprint and trace, by the two lowest flags

local time = call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)
local answers = {now_us}
local answered = 0

-- A header with its check.
local function checked(header)
  local a, b, c, d, e = unpack('>I4I4I4I4I2', header)
  return header .. pack('>I4', bxor(a, b, c, d, e))
end

-- The record of somebody who asked before us, changed if it is ours to change.
local function meet(key, record, wish, lease, retention)
  local format, status, flags, high, low = byte(record, 1, 5)
  if format == 3 then
    return record
  end
  if format ~= 2 and format ~= 1 then
    return sub(record, 1, 1)
  end
  local offered = byte(wish, 13)
  if status ~= 1 or flags == nil or flags >= 96 or flags % 32 > 3 or low == nil or high + low == 0 then
    return record
  end
  local checks = format == 2 and 4 or 0 -- bytes of each of its three checks
  local extras = 19 + checks
  if offered % 2 == 1 and flags % 2 == 1 and sub(wish, 14, 29) ~= sub(record, extras, extras + 15) then
    return record
  end
  local mark = extras + EXTRAS[flags % 4] + 2 * checks
  if #record < mark + 15 then
    return record
  end
  -- What is damaged must not be written again under a check that holds.
  if format == 2 and checked(sub(record, 1, 18)) ~= sub(record, 1, 22) then
    return record
  end
  local lease_until = unpack('>I6', record, 13)
  local token = 22 + EXTRAS[offered % 4]
  local new
  if lease_until > 0 and sub(record, mark, mark + 15) == sub(wish, token, token + 15) then
    -- Our own reservation: the answer to an earlier call was lost.
    new = sub(record, 1, 12) .. pack('>I6', now + lease)
    new = format == 2 and checked(new) .. sub(record, 23) or new .. sub(record, 19)
  elseif lease_until <= now then
    local _, fence = unpack('>HI7', record, 4)
    local attempt = math.min(high * 256 + low + 1, 65535)
    local previous = lease_until == 0 and 32 or 64
    local stamp = pack('>HI7I6', attempt, math.max(fence + 1, now_us), now + lease)
    new = checked('\2\1' .. char(offered + previous) .. stamp) .. sub(wish, 14)
  else
    return record
  end
  call('SET', key, new, 'PX', retention)
  return new
end

local times, lease, retention, stamp, headers
for i = 1, #KEYS do
  local key, wish = KEYS[i], ARGV[i]
  if sub(wish, 1, 12) ~= times then
    times = sub(wish, 1, 12)
    lease, retention = unpack('>I6I6', times)
    retention = string.format('%.0f', retention)
    stamp = pack('>HI7I6', 1, now_us, now + lease)
    headers = {}
  end
  local flags = sub(wish, 13, 13)
  local header = headers[flags]
  if not header then
    header = checked('\2\1' .. flags .. stamp)
    headers[flags] = header
  end
  if call('SET', key, header .. sub(wish, 14), 'NX', 'PX', retention) then
    answers[i + 1] = 0
  elseif answered >= LONG_ENOUGH then
    answers[i + 1] = 2
  else
    local record = pcall('GET', key)
    if type(record) == 'string' then
      record = meet(key, record, wish, lease, retention)
      answered = answered + #record
      answers[i + 1] = record
    elseif string.find(record.err, 'WRONGTYPE', 1, true) then
      answers[i + 1] = 1
    else
      return record
    end
  end
end
return answers

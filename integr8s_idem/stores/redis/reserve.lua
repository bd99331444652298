-- Reserve keys.
-- KEYS   record keys
-- ARGV   for each key a request: lease in ms (6 bytes), retention in ms (6), flags (1), fingerprint, trace,
--        checks (8), token (16), owner; see codec.py.  The highest flag means that the attempt runs alone
-- Answer {now in µs, answer per key}; an answer is
--        0            absent before, now reserved: attempt 1, fence = now
--        1            the key has another Redis type
--        2            not read because the answer reached its limit: ask again
--        a string     the record after this call; if it was taken over from an attempt with a trace, preceded by a zero
--                     byte, which no record begins with, and that trace (24)
local call, pcall = redis.call, redis.pcall
local byte, char, sub = string.byte, string.char, string.sub
local pack, unpack, bxor = struct.pack, struct.unpack, bit.bxor
local MAX_ANSWER_BYTES = 4194304

local time = call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)
local answers = {now_us}
local answered = 0

-- Append the check to a header.
local function checked(header)
  local a, b, c, d, e = unpack('>I4I4I4I4I2', header)
  return header .. pack('>I4', bxor(a, b, c, d, e))
end

-- Most keys are absent or settled.  Defining the functions below takes longer than handling such a key, so this loop
-- handles them, up to the first other key.  Neighbors are mostly alike: after an absent key, the next one is written
-- unless it exists, without reading it first.
local first_other
local times_and_flags, header, life
local is_written = false
for i = 1, #KEYS do
  local key, request = KEYS[i], ARGV[i]
  local flags = byte(request, 13)
  local record = not is_written and pcall('GET', key)
  is_written = false
  if not record and flags < 128 then
    local own = sub(request, 1, 13)
    if own ~= times_and_flags then
      times_and_flags = own
      local lease
      lease, life = unpack('>I6I6', own)
      life = string.format('%.0f', life)
      header = checked(pack('>BBBHI7I6', 2, 1, flags, 1, now_us, now + lease))
    end
    is_written = call('SET', key, header .. sub(request, 14), 'PX', life, 'NX')
    if not is_written then
      record = pcall('GET', key)
    end
  end
  if is_written then
    answers[i + 1] = 0
  elseif type(record) == 'string' and byte(record) == 3 and answered < MAX_ANSWER_BYTES then
    answered = answered + #record
    answers[i + 1] = record
  else
    first_other = i
    break
  end
end
if not first_other then
  return answers
end

local NOBODY = string.rep('\0', 16) -- token of a record that is scheduled
local EXTRAS = {[0] = 0, 16, 24, 40} -- bytes of fingerprint and trace, by the two lowest flags

-- Continue the CRC-32 `crc` of a prefix with `text`.
local function continued(crc, text)
  crc = bit.bnot(crc)
  for i = 1, #text do
    crc = bxor(crc, byte(text, i))
    for _ = 1, 8 do
      crc = bxor(bit.rshift(crc, 1), bit.band(0xEDB88320, -bit.band(crc, 1)))
    end
  end
  return bit.bnot(crc)
end

-- Whether the checks of everything after the header match; it is slow, so only takeovers use it.
local function intact(record, extras, token_at)
  local of_extras, of_rest = unpack('>I4I4', record, token_at - 8)
  return continued(0, sub(record, extras, token_at - 9)) == bit.tobit(of_extras)
    and continued(0, sub(record, token_at)) == bit.tobit(of_rest)
end

-- Append the history of attempts, if there is one, to the part after the header: a byte that is not valid in UTF-8,
-- and in decimal the attempts that lapsed, how many of them ran alone, and whether the current one runs alone.
local function with_history(body, extras, lapsed, lapsed_alone, alone)
  if lapsed == 0 and alone == 0 then
    return body
  end
  local history = string.format('\255%d,%d,%d', lapsed, lapsed_alone, alone)
  local check = pack('>I4', continued(unpack('>I4', body, extras + 5), history))
  return sub(body, 1, extras + 4) .. check .. sub(body, extras + 9) .. history
end

-- Return the history of a record whose token begins at `token_at`.
local function history_of(record, token_at)
  local at = string.find(record, '\255', token_at + 16, true)
  if not at then
    return 0, 0, 0
  end
  local lapsed, lapsed_alone, alone = string.match(record, '^(%d+),(%d+),(%d)', at + 1)
  return tonumber(lapsed) or 0, tonumber(lapsed_alone) or 0, tonumber(alone) or 0
end

-- Whether two fingerprints show that the key is used with another payload.  If the first bit is 1, the first four bytes
-- name the set of fields, and only fingerprints of the same set are compared.
local function is_other_payload(stored, offered)
  return stored ~= offered
    and (sub(stored, 1, 4) == sub(offered, 1, 4) or byte(stored) < 128 and byte(offered) < 128)
end

-- Take over or refresh an existing record if the request may do so, and return the answer.
local function update(key, record, request, lease, life)
  local format, status, flags, high, low = byte(record, 1, 5)
  if format == 3 then
    return record
  end
  if format ~= 2 and format ~= 1 then
    return sub(record, 1, 1)
  end
  local offered, alone = byte(request, 13), 0
  if offered >= 128 then
    offered, alone = offered - 128, 1
  end
  if status ~= 1 or flags == nil or flags >= 96 or flags % 32 > 3 or low == nil or high + low == 0 then
    return record
  end
  local checks = format == 2 and 4 or 0 -- bytes of each of the three checks
  local extras = 19 + checks
  local token_at = extras + EXTRAS[flags % 4] + 2 * checks
  if #record < token_at + 15 then
    return record
  end
  if offered % 2 == 1 and flags % 2 == 1 and is_other_payload(sub(record, extras, extras + 15), sub(request, 14, 29)) then
    return record
  end
  -- A damaged record must not be rewritten with a valid check.
  if format == 2 and checked(sub(record, 1, 18)) ~= sub(record, 1, 22) then
    return record
  end
  local lease_until = unpack('>I6', record, 13)
  local token = 22 + EXTRAS[offered % 4]
  local lapsed, lapsed_alone, was_alone = history_of(record, token_at)
  local new
  local previous_trace = ''
  if lease_until > 0 and sub(record, token_at, token_at + 15) == sub(request, token, token + 15) then
    -- The caller's own reservation: the answer to an earlier call was lost.
    if alone == was_alone then
      new = sub(record, 1, 12) .. pack('>I6', now + lease)
      new = format == 2 and checked(new) .. sub(record, 23) or new .. sub(record, 19)
    else
      new = checked('\2\1' .. char(offered + flags - flags % 32) .. sub(record, 4, 12) .. pack('>I6', now + lease))
      new = new .. with_history(sub(request, 14), EXTRAS[offered % 4], lapsed, lapsed_alone, alone)
    end
  elseif lease_until <= now then
    if format == 2 and not intact(record, extras, token_at) then
      return record
    end
    local _, fence = unpack('>HI7', record, 4)
    local attempt = math.min(high * 256 + low + 1, 65535)
    local is_free = lease_until == 0 or sub(record, token_at, token_at + 15) == NOBODY
    local previous = is_free and 32 or 64
    if previous == 64 then
      lapsed, lapsed_alone = lapsed + 1, lapsed_alone + was_alone
    end
    local stamp = pack('>HI7I6', attempt, math.max(fence + 1, now_us), now + lease)
    new = checked('\2\1' .. char(offered + previous) .. stamp)
    new = new .. with_history(sub(request, 14), EXTRAS[offered % 4], lapsed, lapsed_alone, alone)
    if flags % 4 >= 2 then
      previous_trace = '\0' .. sub(record, token_at - 2 * checks - 24, token_at - 2 * checks - 1)
    end
  else
    return record
  end
  call('SET', key, new, 'PX', life)
  return previous_trace .. new
end

for i = first_other, #KEYS do
  local key, request = KEYS[i], ARGV[i]
  local lease, life = unpack('>I6I6', request)
  life = string.format('%.0f', life)
  local record = pcall('GET', key)
  if not record then
    local flags = byte(request, 13)
    local alone = flags >= 128 and 1 or 0
    flags = flags % 128
    local new = checked(pack('>BBBHI7I6', 2, 1, flags, 1, now_us, now + lease))
    call('SET', key, new .. with_history(sub(request, 14), EXTRAS[flags % 4], 0, 0, alone), 'PX', life)
    answers[i + 1] = 0
  elseif answered >= MAX_ANSWER_BYTES then
    answers[i + 1] = 2
  elseif type(record) == 'string' then
    record = update(key, record, request, lease, life)
    answered = answered + #record
    answers[i + 1] = record
  elseif string.find(record.err, 'WRONGTYPE', 1, true) then
    answers[i + 1] = 1
  else
    return record
  end
end
return answers

-- Schedule work: nobody holds the key, and it may be reserved when a delay has passed.
-- KEYS   record keys
-- ARGV   delay in ms (6 bytes) and lifetime in ms (6), then for each key: fence (7 bytes) and token (16 bytes)
-- Answer per key: 1 if scheduled, now or earlier; 0 if taken over, settled or gone
local call, pcall = redis.call, redis.pcall
local byte, char, sub = string.byte, string.char, string.sub
local pack, unpack, bxor = struct.pack, struct.unpack, bit.bxor
local EXTRAS = {[0] = 0, 16, 24, 40}
local NOBODY = string.rep('\0', 16)

local time = call('TIME')
local delay, lifetime = unpack('>I6I6', ARGV[1])
local due = pack('>I6', time[1] * 1000 + math.floor(time[2] / 1000) + delay)
local new_high, new_low = unpack('>I4I2', due)
local answers = {}

-- How the CRC-32 of a text changes if `token`, which `length` bytes follow, becomes `NOBODY`.  CRC-32 is linear, so the
-- change does not depend on what follows, and damage remains detectable.
local function change_of_check(token, length)
  local crc = 0
  for i = 1, 16 + length do
    crc = bxor(crc, byte(token, i) or 0)
    for _ = 1, 8 do
      crc = bxor(bit.rshift(crc, 1), bit.band(0xEDB88320, -bit.band(crc, 1)))
    end
  end
  return crc
end

for i = 1, #KEYS do
  local key, holder = KEYS[i], ARGV[i + 1]
  local record = pcall('GET', key)
  local answer = 0
  if type(record) == 'string' then
    local format, status, flags = byte(record, 1, 3)
    if format == 2 and status == 1 and flags and sub(record, 6, 12) == sub(holder, 1, 7) then
      local at = 31 + EXTRAS[flags % 4]
      local token = sub(record, at, at + 15)
      if token == NOBODY then
        -- Scheduled by an earlier call; the fence identifies the reservation.
        -- Write the same byte again, because WAIT covers only writes of its own connection.
        call('SETRANGE', key, 0, char(format))
        answer = 1
      elseif token == sub(holder, 8, 23) then
        local high, low, check = unpack('>I4I2I4', record, 13)
        local check_of_rest = bxor(unpack('>I4', record, at - 4), change_of_check(token, #record - at - 15))
        local new = sub(record, 1, 12) .. due .. pack('>I4', bxor(check, high, low, new_high, new_low))
        new = new .. sub(record, 23, at - 5) .. pack('>I4', check_of_rest) .. NOBODY .. sub(record, at + 16)
        call('SET', key, new, 'PX', string.format('%.0f', math.max(lifetime, call('PTTL', key))))
        answer = 1
      end
    end
  elseif record and not string.find(record.err, 'WRONGTYPE', 1, true) then
    return record
  end
  answers[i] = answer
end
return answers

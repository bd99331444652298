-- Complete or fail many reservations at once.
-- KEYS   record keys
-- ARGV   the new status (1 byte), then for each key: ttl in ms (6 bytes), fence (7), token (16), flags (1), and
--        what follows the check of fingerprint and trace in the record to be; see codec.py
-- Answer per key: 1 written, or written earlier by the same reservation; 0 no longer ours, or gone
local call, pcall = redis.call, redis.pcall
local byte, char, sub = string.byte, string.char, string.sub
local pack, unpack, bxor = struct.pack, struct.unpack, bit.bxor
local EXTRAS = {[0] = 0, 16, 24, 40}

local time = call('TIME')
local now = pack('>I6', time[1] * 1000 + math.floor(time[2] / 1000))
local status = ARGV[1]
local code = byte(status)
local now_high, now_low = unpack('>I4I2', now)
local head = '\2' .. status
local answers = {}

local packed_ttl, ttl
for i = 1, #KEYS do
  local key, outcome = KEYS[i], ARGV[i + 1]
  if sub(outcome, 1, 6) ~= packed_ttl then
    packed_ttl = sub(outcome, 1, 6)
    ttl = string.format('%.0f', unpack('>I6', packed_ttl))
  end
  local record = pcall('GET', key)
  local answer = 0
  if type(record) == 'string' then
    local format, was, flags = byte(record, 1, 3)
    if format == 2 and was == 1 and flags then
      local kept = flags % 4
      local extras = EXTRAS[kept]
      if sub(record, 6, 12) .. sub(record, 31 + extras, 46 + extras) == sub(outcome, 7, 29) then
        -- The header's check, changed by what changes in the header: what does not hold now will not hold then.
        local first, lease_high, lease_low, check = unpack('>I4', record), unpack('>I4I2I4', record, 13)
        local new = kept + byte(outcome, 30)
        local changed = first + (code - 1) * 65536 + (new - flags) * 256
        check = bxor(check, first, changed, lease_high, lease_low, now_high, now_low)
        call('SET', key, head .. char(new) .. sub(record, 4, 12) .. now .. pack('>I4', check)
          .. sub(record, 23, 26 + extras) .. sub(outcome, 31), 'PX', ttl)
        answer = 1
      end
    elseif format == 2 and was == code and sub(record, 6, 12) == sub(outcome, 7, 13) then
      -- The fence names the reservation: terminal records keep no token.
      -- Written once more, as it is: WAIT speaks only of what its own connection wrote.
      call('SETRANGE', key, 0, '\2')
      answer = 1
    end
  elseif record and not string.find(record.err, 'WRONGTYPE', 1, true) then
    return record
  end
  answers[i] = answer
end
return answers

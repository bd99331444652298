-- Extend leases.
-- KEYS   record keys
-- ARGV   lease in ms, then for each key: fence (7 bytes) and token (16 bytes)
-- Answer per key: 1 if renewed; 0 if taken over, released, settled or gone
local call, pcall = redis.call, redis.pcall
local byte, sub = string.byte, string.sub
local pack, unpack, bxor = struct.pack, struct.unpack, bit.bxor
local EXTRAS = {[0] = 0, 16, 24, 40}
local RELEASED = '\0\0\0\0\0\0'

local time = call('TIME')
local lease = tonumber(ARGV[1])
local lease_until = pack('>I6', time[1] * 1000 + math.floor(time[2] / 1000) + lease)
local new_high, new_low = unpack('>I4I2', lease_until)
local answers = {}

for i = 1, #KEYS do
  local key, holder = KEYS[i], ARGV[i + 1]
  local record = pcall('GET', key)
  local answer = 0
  if type(record) == 'string' then
    local format, status, flags = byte(record, 1, 3)
    if format == 2 and status == 1 and flags and sub(record, 6, 12) == sub(holder, 1, 7)
      and sub(record, 13, 18) ~= RELEASED then
      local token = 31 + EXTRAS[flags % 4]
      if sub(record, token, token + 15) == sub(holder, 8, 23) then
        -- SETRANGE keeps the expiry.
        -- Update the check incrementally, so that a damaged header remains detectable.
        local high, low, check = unpack('>I4I2I4', record, 13)
        call('SETRANGE', key, 12, lease_until .. pack('>I4', bxor(check, high, low, new_high, new_low)))
        if call('PTTL', key) < lease then
          -- Keep the record longer than its lease, so that the attempt is still counted.
          call('PEXPIRE', key, 2 * lease)
        end
        answer = 1
      end
    end
  elseif record and not string.find(record.err, 'WRONGTYPE', 1, true) then
    return record
  end
  answers[i] = answer
end
return answers

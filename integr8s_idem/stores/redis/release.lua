-- End leases now, and keep the number of attempts.
-- KEYS   record keys
-- ARGV   for each key: fence (7 bytes), token (16 bytes), and lifetime in ms for a record without expiry (6 bytes)
-- Answer per key: 1 if released, now or earlier; 0 if taken over, settled or gone
local call, pcall = redis.call, redis.pcall
local byte, sub = string.byte, string.sub
local pack, unpack, bxor = struct.pack, struct.unpack, bit.bxor
local EXTRAS = {[0] = 0, 16, 24, 40}
local RELEASED = '\0\0\0\0\0\0'

local answers = {}

for i = 1, #KEYS do
  local key, holder = KEYS[i], ARGV[i]
  local record = pcall('GET', key)
  local answer = 0
  if type(record) == 'string' then
    local format, status, flags = byte(record, 1, 3)
    if format == 2 and status == 1 and flags and sub(record, 6, 12) == sub(holder, 1, 7) then
      local token = 31 + EXTRAS[flags % 4]
      if sub(record, token, token + 15) == sub(holder, 8, 23) then
        -- Update the check incrementally, so that a damaged header remains detectable.
        local high, low, check = unpack('>I4I2I4', record, 13)
        call('SETRANGE', key, 12, RELEASED .. pack('>I4', bxor(check, high, low)))
        if call('PTTL', key) < 0 then
          call('PEXPIRE', key, string.format('%.0f', unpack('>I6', holder, 24)))
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

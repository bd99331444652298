-- Complete or fail many reservations at once.
-- KEYS   record keys
-- ARGV   the new status (1 byte), then for each key: fence (7 bytes) and token (16 bytes), ttl in ms, outcome
--        outcome = flags (1 byte), then what follows fingerprint and trace; see codec.py
-- Answer per key: 1 written, or written earlier by the same reservation; 0 no longer ours, or gone
local call, pcall = redis.call, redis.pcall
local byte, char, sub = string.byte, string.char, string.sub
local EXTRAS = {[0] = 0, 16, 24, 40}

local time = call('TIME')
local now = struct.pack('>I6', time[1] * 1000 + math.floor(time[2] / 1000))
local status = ARGV[1]
local code = byte(status)
local head = '\1' .. status
local answers = {}

for i = 1, #KEYS do
  local key, mark, ttl, outcome = KEYS[i], ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
  local record = pcall('GET', key)
  local answer = 0
  if type(record) == 'string' then
    local format, was, flags = byte(record, 1, 3)
    if format == 1 and flags and sub(record, 6, 12) == sub(mark, 1, 7) then
      if was == 1 then
        flags = flags % 4
        local extras = EXTRAS[flags]
        if sub(record, 19 + extras, 34 + extras) == sub(mark, 8, 23) then
          call('SET', key, head .. char(flags + byte(outcome)) .. sub(record, 4, 12) .. now
            .. sub(record, 19, 18 + extras) .. sub(outcome, 2), 'PX', ttl)
          answer = 1
        end
      elseif was == code then
        -- The fence names the reservation: terminal records keep no token.
        answer = 1
      end
    end
  elseif record and not string.find(record.err, 'WRONGTYPE', 1, true) then
    return record
  end
  answers[i] = answer
end
return answers

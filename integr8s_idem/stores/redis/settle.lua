-- Complete or fail reservations.
-- KEYS   record keys
-- ARGV   the new status (1 byte), then for each key: ttl in ms (6 bytes), fence (7), token (16), flags (1), and
--        everything after fingerprint and trace in the new record; see codec.py
-- Answer per key: 1 if written, now or earlier by the same reservation; 0 if taken over or gone
local call, pcall = redis.call, redis.pcall
local byte, sub, floor = string.byte, string.sub, math.floor
local pack, unpack, bxor = struct.pack, struct.unpack, bit.bxor
local LONGEST = 1099511627775 -- ms in five bytes: 34 years

local time = call('TIME')
local now = time[1] * 1000 + floor(time[2] / 1000)
local status = ARGV[1]
local code = byte(status)
local answers = {}

local packed_ttl, ttl
for i = 1, #KEYS do
  local key, outcome = KEYS[i], ARGV[i + 1]
  local own_ttl = sub(outcome, 1, 6)
  if own_ttl ~= packed_ttl then
    packed_ttl = own_ttl
    ttl = string.format('%.0f', unpack('>I6', packed_ttl))
  end
  local record = pcall('GET', key)
  local answer = 0
  if type(record) == 'string' then
    local format, was, flags = byte(record, 1, 3)
    if format == 2 and was == 1 and flags then
      local kept = flags % 4
      local extras = kept == 0 and 0 or kept == 1 and 16 or kept == 2 and 24 or 40 -- bytes of fingerprint and trace
      if sub(record, 31 + extras, 46 + extras) == sub(outcome, 14, 29) and sub(record, 6, 12) == sub(outcome, 7, 13) then
        -- Both headers as 32-bit words, since taking them apart as strings takes longer.  The fence is the last three
        -- bytes of `b`, and `c`; in the new header, it begins one byte earlier.
        local a, b, c, d, e, check = unpack('>I4I4I4I4I2I4', record)
        local fence_high = b % 0x1000000
        local elapsed = now - floor((fence_high * 4294967296 + c) / 1000)
        elapsed = elapsed < 0 and 0 or elapsed > LONGEST and LONGEST or elapsed
        local n = 0x3000000 + (code * 32 + kept + byte(outcome, 30)) * 0x10000 + a % 256 * 256 + floor(b / 0x1000000)
        local o = fence_high * 256 + floor(c / 0x1000000)
        local p = c % 0x1000000 * 256 + floor(elapsed / 4294967296)
        local q = elapsed % 4294967296
        -- Derive the new check from the old one, so that a damaged header remains detectable.
        check = bxor(check, a, b, c, d, e, n, o, p, q, (unpack('>I4', record, 23 + extras)))
        local new = pack('>I4I4I4I4I4', n, o, p, q, check) .. sub(record, 23, 22 + extras) .. sub(outcome, 31)
        call('SET', key, new, 'PX', ttl)
        answer = 1
      end
    elseif format == 3 and floor(was / 32) == code and sub(record, 5, 11) == sub(outcome, 7, 13)
      or format == 2 and was == code and sub(record, 6, 12) == sub(outcome, 7, 13) then
      -- The fence identifies the reservation, since settled records have no token.
      -- Write the same byte again, because WAIT covers only writes of its own connection.
      call('SETRANGE', key, 0, string.char(format))
      answer = 1
    end
  elseif record and not string.find(record.err, 'WRONGTYPE', 1, true) then
    return record
  end
  answers[i] = answer
end
return answers

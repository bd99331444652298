-- End the leases of records now, or delete records, unless they changed since they were read.
-- KEYS   record keys
-- ARGV   'end' or 'forget', then for each key the state that was read: status (1 byte), fence (7), and while
--        processing the end of the lease in ms (6)
-- Answer per key: 1 if done; 0 if the record changed or is gone
local call, pcall = redis.call, redis.pcall
local byte, sub = string.byte, string.sub
local pack, unpack, bxor = struct.pack, struct.unpack, bit.bxor
local RELEASED = '\0\0\0\0\0\0'

local function is_unchanged(record, seen)
  local format, status = byte(record, 1, 2)
  if format == 3 then
    return math.floor((status or 0) / 32) == byte(seen, 1) and sub(record, 5, 11) == sub(seen, 2, 8)
  end
  return (format == 2 or format == 1) and status == byte(seen, 1) and sub(record, 6, 12) == sub(seen, 2, 8)
    and (status ~= 1 or sub(record, 13, 18) == sub(seen, 9, 14))
end

local answers = {}

for i = 1, #KEYS do
  local key, seen = KEYS[i], ARGV[i + 1]
  local record = pcall('GET', key)
  local answer = 0
  if type(record) == 'string' then
    if is_unchanged(record, seen) then
      if ARGV[1] == 'forget' then
        call('UNLINK', key)
        answer = 1
      elseif byte(record, 2) == 1 then
        -- SETRANGE keeps the expiry, so that the attempt is still counted.
        if byte(record, 1) == 2 then
          -- Update the check incrementally, so that a damaged header remains detectable.
          local high, low, check = unpack('>I4I2I4', record, 13)
          call('SETRANGE', key, 12, RELEASED .. pack('>I4', bxor(check, high, low)))
        else
          call('SETRANGE', key, 12, RELEASED)
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

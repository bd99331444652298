-- Read records with their remaining lifetimes, all at the same time.
-- KEYS   record keys
-- Answer {now in µs, record, remaining lifetime in ms, record, …}; a record is a string, nil if absent,
--        1 for another Redis type, 2 if not read because the answer reached its limit: ask again
local call, pcall = redis.call, redis.pcall
local MAX_ANSWER_BYTES = 4194304

local time = call('TIME')
local answers = {time[1] * 1000000 + time[2]}
local answered = 0

for i = 1, #KEYS do
  local record, life = 2, -1
  if answered < MAX_ANSWER_BYTES then
    record = pcall('GET', KEYS[i])
    if type(record) == 'string' then
      answered = answered + #record
      life = call('PTTL', KEYS[i])
    elseif record then
      if not string.find(record.err, 'WRONGTYPE', 1, true) then
        return record
      end
      record = 1
    end
  end
  answers[2 * i], answers[2 * i + 1] = record, life
end
return answers

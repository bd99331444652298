"""The HELP texts of all metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from integr8s_idem.telemetry import Gauge, Signal

HELP: Final[Mapping[Signal | Gauge, str]] = {
    Signal.CACHE_HIT: "Keys that already had a record, once per delivery and handler.",
    Signal.CACHE_MISS: "Keys without a record, once per delivery and handler.",
    Signal.DUPLICATE_BLOCKED: "Deliveries whose handler did not run, since the work was completed, failed or running.",
    Signal.TAKEOVER: "Reservations taken over from owners whose lease expired.",
    Signal.ISOLATED: "Runs that were alone in the process because earlier attempts at their event had lapsed.",
    Signal.STALE_START_PREVENTED: (
        "Handlers not started because their lease had expired or was about to; their keys were reserved again."
    ),
    Signal.RESERVATION_LOST: "Runs that lost their reservation before they ended.",
    Signal.RECORD_VANISHED: "Records missing in the store when their run ended.",
    Signal.STORE_DATA_LOST: "Detected losses of all records: the store was flushed or replaced while the service ran.",
    Signal.STORE_FAILOVER: "Detected failovers of the store to another primary; its last writes may be lost.",
    Signal.STORE_RESTART: "Detected restarts of a store that may lose its last writes.",
    Signal.WAITED: "Deliveries that waited for another run.",
    Signal.KEY_REUSED: "Keys used again with a different payload.",
    Signal.CORRUPT_RECORD: "Records that could not be read.",
    Signal.RESULT_DROPPED: "Results not stored because they are too large or cannot be encoded.",
    Signal.RESULT_BYTES: "Bytes of stored results.",
    Signal.STORE_ERROR: "Failed calls to the store, counted for each unit of work in the call.",
    Signal.PURGED: "Expired records purged in the background.",
    Signal.UNGUARDED: "Handlers run without a reservation.",
    Signal.DELIVERED: "Deliveries received from the broker; undecodable messages have no event type.",
    Signal.HANDLED: "Deliveries whose handler succeeded.",
    Signal.HANDLER_FAILED: "Runs of handlers that raised an error or timed out.",
    Signal.RECONCILED: "Calls of reconcile functions, by answer; `failed` if there was none.",
    Signal.RETRY: "Deliveries scheduled for a retry.",
    Signal.DEAD_LETTER: "Messages published to a dead-letter topic, by reason.",
    Signal.RETRY_COPY: "Copies of events that were published to retry topics.",
    Signal.DISCARDED: "Deliveries whose handler failed with an error that a rule discards.",
    Signal.UNDECODABLE: "Messages that could not be decoded, by reason.",
    Signal.REPLAY_REFUSED: "Messages whose replay headers were ignored, by reason.",
    Signal.REPLAY_FOR_OTHERS: "Replays skipped because they are for another consumer group.",
    Signal.PUBLISHED: "Outgoing events confirmed by the broker.",
    Signal.COMMIT_FAILED: "Failed offset commits.",
    Signal.REBALANCE: "Rebalances that revoked partitions.",
    Signal.PARTITION_DAMAGED: "Partitions paused because a batch in them cannot be read.",
    Signal.SERVICE_STOPPED: "Handlers that failed with an error for which a rule stops the service.",
    Signal.STALE_COMPLETION: "Deliveries settled after their partition was revoked.",
    Signal.STEP_ORPHANED: "Recorded steps that the last run of their key did not use.",
    Signal.OUTBOX_FAILURE: "Failed attempts to publish an event of an outbox; the event stays there.",
    Gauge.KEYS_ACTIVE: "Active keys, counted in the store periodically.",
    Gauge.IN_FLIGHT: "Deliveries received from the broker and not settled.",
    Gauge.CONSUMER_LAG: (
        "Messages between the committed offsets and the end of a topic, in the partitions that this worker reads; 0 "
        "once all are settled, and while it has no partitions, as during a rebalance."
    ),
    Gauge.STORE_UP: "1 while the store is available, otherwise 0.",
    Gauge.OUTBOX_WAITING: "Events of committed transactions that are not published yet.",
    Gauge.OUTBOX_AGE: "How long the oldest of these events has waited, in seconds.",
    Gauge.EVENT_LOOP_LAG: "Delay of the event loop in seconds.",
    Gauge.LIMIT_WAITING: "Events that wait because enough with the same value of a field are being handled (limit_by).",
    Gauge.NATIVE_CODE: "1 if the process uses the native code of integr8s-idem-speedups, otherwise 0.",
    Gauge.OBSERVE_TTL: "How long a service in observe mode keeps records, in seconds; absent in other services.",
}

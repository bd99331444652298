"""Find out what a store knows about one event, and explain it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from integr8s_idem.config import IdempotencyConfig, Settings
from integr8s_idem.errors import ApplicationError, IdempotencyError, UndecodableEventError
from integr8s_idem.failures import FailureRule
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.keys import KeySpace, generation_key
from integr8s_idem.keys.event_keys import KeyStrategy
from integr8s_idem.operations.keys.explanation import Explanation, MissingRecord, RecordExplanation, newest_after
from integr8s_idem.operations.keys.kafka_message import (
    EventIdentity,
    MessagePlace,
    event_identities,
    message_at,
    parse_place,
)
from integr8s_idem.operations.keys.key_parser import (
    ParsedKey,
    check_name,
    generations_of,
    key_space,
    literal_parts,
    matches_name,
    parse_key,
)
from integr8s_idem.operations.keys.next_delivery import NextDelivery
from integr8s_idem.operations.keys.open_services import OpenService, RecordPlace
from integr8s_idem.operations.keys.record_reader import Advance, AnyRecord, read_records, read_steps, scan_records
from integr8s_idem.operations.keys.undecodable_message import decoding_error, undecodable_notes
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.worker.dead_letters import record_key_of
from integr8s_idem.worker.kafka_protocols import Record
from integr8s_idem.worker.replay_policy import OTHER_EVENT, ReplayDecision, ReplayPolicy, asks_for, follows_a_failure

MAX_RECORDS: Final = 20
"""Maximum number of records in an explanation."""


_STEP_NEXT_DELIVERY: Final = (
    "decided by the unit of work that contains this step; if that runs again, the step returns its stored result"
)


READINGS: Final = ("key", "event", "message")
"""What a name can be: a full key; an event's id or another part of a key; the place of a Kafka message."""


class Explainer:
    """Explains the records of one store, with or without the application's services."""

    def __init__(
        self,
        settings: Settings,
        repository: IdempotencyRepository,
        services: Sequence[OpenService] = (),
        advance: Advance = lambda _: None,
    ) -> None:
        """Explain records of `repository`.

        Args:
            settings: Settings of the services.
            repository: The store.
            services: The services of the application, if it was given.
            advance: Called with the number of keys that were scanned.
        """
        self._settings = settings
        self._repository = repository
        self._services = services
        self._advance = advance
        self._prefix = settings.idempotency.key_prefix

    async def explain(self, text: str, reading: str | None = None) -> Explanation:
        """Explain `text`, interpreted as `reading`, which is one of `READINGS`, or guessed if not given.

        Raises:
            ApplicationError: `text` is empty, is not valid UTF-8, or does not fit `reading`.
            StoreError: The store refuses the connection.
        """
        if not text.strip():
            raise ApplicationError("name what to explain: a key, an event's id, or topic:partition:offset")
        place = parse_place(check_name(text))
        if reading == "message" and place is None:
            raise ApplicationError(f'invalid place "{text}" of a message; write topic:partition:offset')
        if reading == "key" or (reading is None and text.startswith(f"{self._prefix}:")):
            return await self._full_key(text)
        if place is not None and reading != "event":
            return await self._message(text, place)
        return await self._by_name(text)

    async def _full_key(self, text: str) -> Explanation:
        answer = Explanation(text, "a full key")
        found = await read_records(self._repository, [text])
        parsed = parse_key(text, self._prefix)
        if not parsed.scope:
            answer.notes.append(f"invalid key for these settings: full keys start with {self._prefix}:SERVICE:")
        if text in found:
            answer.records.append(await self._explain_record(self._repository, parsed, found[text]))
        else:
            others = await self._generations(self._repository, parsed)
            for full in list(others.values())[:MAX_RECORDS]:
                answer.records.append(
                    await self._explain_record(self._repository, parse_key(full.key, self._prefix), full)
                )
            next_delivery = self._next_delivery(parsed, self._config(parsed.scope)).describe(None)
            if parsed.scope:
                answer.absent.append(
                    MissingRecord(parsed.scope, parsed.handler, parsed.event_type, text, next_delivery)
                )
        return answer

    async def _by_name(self, text: str) -> Explanation:
        if self._services:
            answer = Explanation(text, "an event's id or a key, of the application's handlers")
            await self._places(answer, *self._by_repository(text))
            if answer.records:
                return answer
            answer.absent = [absent for absent in answer.absent if absent.key]
        else:
            answer = Explanation(text, "an event's id or another part of a key; all keys were searched")
            await self._search(answer, text)
        self._note_search_limits(answer)
        return answer

    def _by_repository(self, text: str) -> list[tuple[IdempotencyRepository, list[RecordPlace]]]:
        return [
            (service.repository, list(service.places(text)))
            for service in self._services
            if service.repository is not None
        ]

    async def _places(self, answer: Explanation, *asked: tuple[IdempotencyRepository, Sequence[RecordPlace]]) -> None:
        missing: list[RecordPlace] = []
        for repository, places in asked:
            found = await read_records(repository, [place.key for place in places])
            for key, record in found.items():
                answer.records.append(await self._explain_record(repository, parse_key(key, self._prefix), record))
            missing += [place for place in places if place.key not in found and place.expected]
        types = {explained.parsed.event_type for explained in answer.records}
        for place in missing:
            # An event has one type: once it is known, handlers of other types are irrelevant.
            if not types or place.event_type in types:
                answer.absent.append(self._missing(place.service, place.handler, place.event_type, place.key))

    async def _search(self, answer: Explanation, text: str) -> None:
        count = 0
        async for found in scan_records(self._repository, f"{self._prefix}:", literal_parts(text), self._advance):
            parsed = parse_key(found.key, self._prefix)
            if parsed.step is not None or not matches_name(parsed, text):
                continue
            count += 1
            if count <= MAX_RECORDS:
                answer.records.append(await self._explain_record(self._repository, parsed, found))
        answer.more = max(count - MAX_RECORDS, 0)

    def _note_search_limits(self, answer: Explanation) -> None:
        if answer.records:
            return
        if not self._services:
            if self._settings.idempotency.hash_keys:
                answer.notes.append("keys are hashed (hash_keys): use --app MODULE:APP to compute them")
            answer.notes.append(
                "no record: the event was never seen, or its record has expired; the next delivery would be handled. "
                "Keys that are hashed or made of an event's content cannot be found by id: use --app MODULE:APP or "
                "topic:partition:offset"
            )
        by_content = [
            f"{service.name}.{handler.name}"
            for service in self._services
            for handler in service.guarded
            if handler.resolver.strategy is not KeyStrategy.EVENT_BASED
        ]
        if by_content:
            answer.notes.append(
                f"keys of {', '.join(by_content)} are made of the event, not of its id: use topic:partition:offset"
            )

    async def _message(self, text: str, place: MessagePlace) -> Explanation:
        answer = Explanation(text, f"the message {place} (use --as event to read it as a key)")
        message = await message_at(self._settings.kafka, place)
        if key := _dead_letter_record(message):
            answer.read_as = f"the dead letter {place}: the record of its handler"
            by_key = await self._full_key(key)
            answer.records, answer.absent, answer.notes = by_key.records, by_key.absent, by_key.notes
            return answer
        if self._services:
            await self._for_services(answer, message)
            return answer
        return await self._for_any_service(answer, message)

    async def _for_any_service(self, answer: Explanation, message: Record) -> Explanation:
        """Without the application, search for the records of all services with this event id."""
        sections = self._settings.services.values()
        identities, error = list(event_identities(message, sections)), decoding_error(message, sections)
        if identities:
            answer.read_as += ": " + " or ".join(f"{one.event_type}:{one.event_id}".strip(":") for one in identities)
        for identity in identities:
            await self._search(answer, _name_of(identity))
        if error is None:
            self._note_search_limits(answer)
            return answer
        answer.notes.append(
            f"the message cannot be decoded with the envelopes of these settings: {error}. Services "
            "dead-letter such messages; with --app MODULE:APP, their own codecs and event classes are used"
        )
        answer.notes += await undecodable_notes(self._settings.kafka, message)
        return answer

    async def _for_services(self, answer: Explanation, message: Record) -> None:
        readers = [service for service in self._services if message.topic in service.topics]
        if not readers:
            answer.notes.append(f"no service of the application reads {message.topic}")
        is_undecodable = False
        for service in readers:
            try:
                await self._for_service(answer, service, message)
            except UndecodableEventError as error:
                answer.notes.append(f"{service.name} cannot decode it and dead-letters it: {error}")
                is_undecodable = True
            except IdempotencyError:
                raise
            except Exception as error:  # noqa: BLE001  # a key function is the user's code
                answer.notes.append(f"{service.name} cannot compute its key and dead-letters it (no_key): {error}")
        if is_undecodable:
            answer.notes += await undecodable_notes(self._settings.kafka, message)

    async def _for_service(self, answer: Explanation, service: OpenService, message: Record) -> None:
        judgement = ReplayPolicy(service.group, self._settings.replay).judge(message)
        if judgement.is_for_others:
            answer.notes.append(f"{service.name} skips it: it is a replay for another consumer group")
            return
        event = service.decoder.decode(message.value, message.headers)
        if not judgement.fits(event.event_id):
            judgement = OTHER_EVENT
        if judgement.refused:
            answer.notes.append(
                f"{service.name} refuses its replay headers ({judgement.refused}), and handles it as an ordinary "
                "delivery"
            )
        for execution in service.dispatcher.executions(event, judgement.generation, judgement.only):
            if not isinstance(execution, GuardedExecution):
                answer.absent.append(self._unguarded(service.name, execution.handler.name, event.event_type))
                continue
            generation = await _generation(execution, judgement)
            key = generation_key(execution.record_key, generation)
            assert service.repository is not None
            found = (await read_records(service.repository, [key])).get(key)
            if found is None:
                answer.absent.append(self._missing(service.name, execution.handler.name, event.event_type, key))
            else:
                parsed = parse_key(key, self._prefix)
                offered, rules = execution.work.fingerprint, execution.handler.failures.rules
                answer.records.append(await self._explain_record(service.repository, parsed, found, offered, rules))

    async def _explain_record(
        self,
        repository: IdempotencyRepository,
        parsed: ParsedKey,
        found: AnyRecord,
        offered: bytes | None = None,
        rules: tuple[FailureRule, ...] | None = None,
    ) -> RecordExplanation:
        """`rules`: those of its handler, if the key of the record may not name it."""
        config = self._config(parsed.scope)
        space = key_space(parsed, self._prefix, hash_keys=config.hash_keys)
        is_step = parsed.step is not None
        generations = {} if is_step else await self._generations(repository, parsed)
        replayed = newest_after(parsed.generation, generations)
        next_delivery = self._next_delivery(parsed, config, rules)
        return RecordExplanation(
            parsed,
            found,
            config,
            _STEP_NEXT_DELIVERY if is_step else next_delivery.describe(found, offered, replayed),
            generations,
            {} if is_step or space is None else await self._steps(repository, space, parsed),
            self._dead_letter_topic(parsed),
            next_delivery.rules,
            next_delivery.other_payloads(),
        )

    async def _generations(self, repository: IdempotencyRepository, parsed: ParsedKey) -> dict[int, AnyRecord]:
        keys = generations_of(parsed.unit)
        found = await read_records(repository, [key for key in keys if key != parsed.full])
        return {keys.index(key): record for key, record in found.items()}

    async def _steps(
        self, repository: IdempotencyRepository, space: KeySpace, parsed: ParsedKey
    ) -> dict[int, AnyRecord]:
        return await read_steps(repository, space, parsed.full)

    def _dead_letter_topic(self, parsed: ParsedKey) -> str:
        kafka = self._settings.kafka
        return f"{kafka.topic_prefix}{parsed.event_type}{kafka.dead_letter_suffix}" if parsed.event_type else ""

    def _config(self, scope: str) -> IdempotencyConfig:
        own = (service.config for service in self._services if service.name == scope)
        return next((config for config in own if config is not None), self._settings.idempotency_for(scope))

    def _next_delivery(
        self, parsed: ParsedKey, config: IdempotencyConfig, rules: tuple[FailureRule, ...] | None = None
    ) -> NextDelivery:
        # The source of a hashed key is unknown; most are keys of events.
        by_worker = bool(parsed.source or parsed.digest)
        service = self._settings.service(parsed.scope)
        isolates = by_worker and service.isolation_share > 0
        observes = by_worker and service.mode == "observe"
        if not by_worker:
            rules = ()  # callers have none
        elif rules is None:
            rules = self._rules(parsed.scope, parsed.handler, parsed.event_type)
        reconciles = any(service.reconciles(parsed) for service in self._services)
        return NextDelivery(
            config, by_worker=by_worker, isolates=isolates, observes=observes, reconciles=reconciles, rules=rules
        )

    def _rules(self, scope: str, handler: str, event_type: str) -> tuple[FailureRule, ...] | None:
        found = (service.rules(handler, event_type) for service in self._services if service.name == scope)
        return next(found, None)

    def _missing(self, service: str, handler: str, event_type: str, key: str) -> MissingRecord:
        next_delivery = NextDelivery(self._config(service), rules=self._rules(service, handler, event_type))
        return MissingRecord(service, handler, event_type, key, next_delivery.describe(None))

    def _unguarded(self, service: str, handler: str, event_type: str) -> MissingRecord:
        return MissingRecord(service, handler, event_type, "", "would be handled: this handler is not guarded")


async def _generation(execution: GuardedExecution, judgement: ReplayDecision) -> int:
    """Return the generation in which a service would handle a message with these replay headers."""
    claim = judgement.unproven
    if claim is None or not asks_for(claim, execution):
        return judgement.generation
    return claim.generation if await follows_a_failure(execution, claim.generation) else 0


def _dead_letter_record(message: Record) -> str:
    """Return the full key in the headers of a dead letter; empty for other messages."""
    try:
        return record_key_of(message)
    except ApplicationError:
        return ""


def _name_of(identity: EventIdentity) -> str:
    return f"{identity.event_type}:{identity.event_id}" if identity.event_type else identity.event_id

"""`keys explain`: what is known of some work, by whatever name people have for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from integr8s_idem.config import IdempotencyConfig, Settings
from integr8s_idem.errors import ApplicationError, IdempotencyError, UndecodableEventError
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.keys import KeySpace, KeyStrategy, generation_key
from integr8s_idem.operations.keys.kafka_message import Identity, MessagePlace, identities, message_at, place_of
from integr8s_idem.operations.keys.key_parser import (
    Named,
    generations_of,
    is_meant,
    named,
    parts_of,
    space_of,
    split_generation,
)
from integr8s_idem.operations.keys.next_delivery import Outlook
from integr8s_idem.operations.keys.open_services import OpenService, Place
from integr8s_idem.operations.keys.record_reader import Advance, Found, read, steps_of, survey
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.worker.dead_letters import record_key_of
from integr8s_idem.worker.kafka_protocols import Record
from integr8s_idem.worker.replay_policy import OTHER_EVENT, ReplayDecision, ReplayPolicy, asks_for, follows_a_failure

MOST_TOLD: Final = 20
"""Records of one answer: more are no screen, but a list."""

_OF_STEPS: Final = "it is a step: its unit decides whether it runs, and then gets what is stored here"

READINGS: Final = ("key", "event", "message")
"""What people may mean: a full key; an event's id, or another part of a key; a message of Kafka."""


@dataclass(frozen=True)
class Account:
    """One record and all that belongs to it."""

    told: Named
    found: Found
    config: IdempotencyConfig
    """Of its service."""
    outlook: str
    """What would happen to its next delivery."""
    generations: dict[int, Found] = field(default_factory=dict)
    """The other generations of the same work."""
    steps: dict[int, Found] = field(default_factory=dict)
    dead_letters: str = ""
    """Where its dead letter stands, if it was given up."""

    @property
    def replayed(self) -> tuple[int, Found] | None:
        """The newest later generation, with its record."""
        return newest_after(self.told.generation, self.generations)


def newest_after(generation: int, generations: Mapping[int, Found]) -> tuple[int, Found] | None:
    """The newest of the later ones, with its record."""
    newest = max(generations, default=generation)
    return (newest, generations[newest]) if newest > generation else None


@dataclass(frozen=True)
class Absent:
    """A handler that has no record of the work."""

    service: str
    handler: str
    event_type: str
    key: str
    """Empty for a handler that is not guarded."""
    outlook: str


@dataclass
class Explanation:
    """The answer."""

    asked: str
    read_as: str
    accounts: list[Account] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    more: int = 0
    """Records that were found besides, and are not told of."""


class Explainer:
    """Answers from one store, with an application or without."""

    def __init__(
        self,
        settings: Settings,
        repository: IdempotencyRepository,
        services: Sequence[OpenService] = (),
        advance: Advance = lambda _: None,
    ) -> None:
        """`services`: those of the application, if one was given; `advance`: told of keys that were gone by."""
        self._settings = settings
        self._repository = repository
        self._services = services
        self._advance = advance
        self._prefix = settings.idempotency.key_prefix

    async def explain(self, text: str, reading: str | None = None) -> Explanation:
        """What is known of `text`; `reading`: one of `READINGS`, if it is not to be guessed.

        Raises:
            ApplicationError: It is nothing that could be looked up.
            StoreError: The store refuses us.
        """
        if not text.strip():
            raise ApplicationError("say what is to be explained: a key, an event's id, or topic:partition:offset")
        place = place_of(text)
        if reading == "message" and place is None:
            raise ApplicationError(f'"{text}" is no message; write topic:partition:offset, as in orders:0:1234')
        if reading == "key" or (reading is None and text.startswith(f"{self._prefix}:")):
            return await self._full_key(text)
        if place is not None and reading != "event":
            return await self._message(text, place)
        return await self._words(text)

    async def _full_key(self, text: str) -> Explanation:
        answer = Explanation(text, "a full key")
        found = await read(self._repository, [text])
        told = named(text, self._prefix)
        if not told.scope:
            answer.notes.append(f"no key of these settings is like that: theirs start with {self._prefix}:SERVICE:")
        if text in found:
            answer.accounts.append(await self._account(self._repository, told, found[text]))
        else:
            others = await self._generations(self._repository, told)
            for full in list(others.values())[:MOST_TOLD]:
                answer.accounts.append(await self._account(self._repository, named(full.key, self._prefix), full))
            outlook = self._outlook(told, self._config(told.scope)).of(None)
            if told.scope:
                answer.absent.append(Absent(told.scope, told.handler, told.event_type, text, outlook))
        return answer

    async def _words(self, text: str) -> Explanation:
        if self._services:
            answer = Explanation(text, "an event's id or a key, for the handlers of the application")
            await self._places(answer, *self._by_repository(text))
            if answer.accounts:
                return answer
            answer.absent = [absent for absent in answer.absent if absent.key]
        else:
            answer = Explanation(text, "an event's id, or another part of a key: all keys were searched for it")
            await self._search(answer, text)
        self._note_what_cannot_be_found(answer)
        return answer

    def _by_repository(self, text: str) -> list[tuple[IdempotencyRepository, list[Place]]]:
        words, generation = split_generation(text)
        return [
            (service.repository, list(service.places(words, generation or 0)))
            for service in self._services
            if service.repository is not None
        ]

    async def _places(self, answer: Explanation, *asked: tuple[IdempotencyRepository, Sequence[Place]]) -> None:
        missing: list[Place] = []
        for repository, places in asked:
            found = await read(repository, [place.key for place in places])
            for key, record in found.items():
                answer.accounts.append(await self._account(repository, named(key, self._prefix), record))
            missing += [place for place in places if place.key not in found and place.expected]
        types = {account.told.event_type for account in answer.accounts}
        for place in missing:
            # An event has one type: of handlers of others there is nothing to be said, once it is known.
            if not types or place.event_type in types:
                answer.absent.append(self._absent(place.service, place.handler, place.event_type, place.key))

    async def _search(self, answer: Explanation, text: str) -> None:
        count = 0
        async for found in survey(self._repository, f"{self._prefix}:", parts_of(text), self._advance):
            told = named(found.key, self._prefix)
            if told.step is not None or not is_meant(told, text):
                continue
            count += 1
            if count <= MOST_TOLD:
                answer.accounts.append(await self._account(self._repository, told, found))
        answer.more = max(count - MOST_TOLD, 0)

    def _note_what_cannot_be_found(self, answer: Explanation) -> None:
        if answer.accounts:
            return
        if not self._services:
            if self._settings.idempotency.hash_keys:
                answer.notes.append("keys are hashed (hash_keys): give --app, so that they can be computed")
            answer.notes.append(
                "no record: it was never seen, or its record has expired; its next delivery would be handled. A key "
                "that is hashed, or made of an event's content, is not found by an id: give --app MODULE:APP or "
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
                f"keys of {', '.join(by_content)} are made of the event, not of its id: give topic:partition:offset"
            )

    async def _message(self, text: str, place: MessagePlace) -> Explanation:
        answer = Explanation(text, f"the message {place} (--as event reads it as a key)")
        message = await message_at(self._settings.kafka, place)
        if key := _record_of_letter(message):
            answer.read_as = f"the dead letter {place}: its handler's record"
            below = await self._full_key(key)
            answer.accounts, answer.absent, answer.notes = below.accounts, below.absent, below.notes
            return answer
        if self._services:
            await self._for_services(answer, message)
            return answer
        return await self._for_anybody(answer, message)

    async def _for_anybody(self, answer: Explanation, message: Record) -> Explanation:
        """Without the application: whoever has a record of an event with this id."""
        who = list(identities(message, self._settings.services.values()))
        if not who:
            answer.notes.append("no event's id can be read in it; give --app MODULE:APP, whose services can")
            return answer
        answer.read_as += ": " + " or ".join(f"{one.event_type}:{one.event_id}".strip(":") for one in who)
        for one in who:
            await self._search(answer, _words_of(one))
        self._note_what_cannot_be_found(answer)
        return answer

    async def _for_services(self, answer: Explanation, message: Record) -> None:
        readers = [service for service in self._services if message.topic in service.topics]
        if not readers:
            answer.notes.append(f"no service of the application reads {message.topic}")
        for service in readers:
            try:
                await self._for_service(answer, service, message)
            except UndecodableEventError as error:
                answer.notes.append(f"{service.name} cannot read it, and dead-letters it ({error.reason}): {error}")
            except IdempotencyError:
                raise
            except Exception as error:  # noqa: BLE001  # a key function is the user's code
                answer.notes.append(f"{service.name} makes no key of it, and dead-letters it (no_key): {error}")

    async def _for_service(self, answer: Explanation, service: OpenService, message: Record) -> None:
        judgement = ReplayPolicy(service.group, self._settings.replay).judge(message)
        if judgement.is_for_others:
            answer.notes.append(f"{service.name} passes it by: it is a replay for another group")
            return
        event = service.decoder.decode(message.value, message.headers)
        if not judgement.fits(event.event_id):
            judgement = OTHER_EVENT
        if judgement.refused:
            answer.notes.append(
                f"{service.name} refuses its replay headers ({judgement.refused}), and handles it as if it had none"
            )
        for execution in service.dispatcher.executions(event, judgement.generation, judgement.only):
            if not isinstance(execution, GuardedExecution):
                answer.absent.append(self._unguarded(service.name, execution.handler.name, event.event_type))
                continue
            generation = await _generation(execution, judgement)
            key = generation_key(execution.record_key, generation)
            assert service.repository is not None
            found = (await read(service.repository, [key])).get(key)
            if found is None:
                answer.absent.append(self._absent(service.name, execution.handler.name, event.event_type, key))
            else:
                told = named(key, self._prefix)
                offered = execution.work.fingerprint
                answer.accounts.append(await self._account(service.repository, told, found, offered))

    async def _account(
        self,
        repository: IdempotencyRepository,
        told: Named,
        found: Found,
        offered: bytes | None = None,
    ) -> Account:
        config = self._config(told.scope)
        space = space_of(told, self._prefix, hash_keys=config.hash_keys)
        is_step = told.step is not None
        generations = {} if is_step else await self._generations(repository, told)
        replayed = newest_after(told.generation, generations)
        return Account(
            told,
            found,
            config,
            _OF_STEPS if is_step else self._outlook(told, config).of(found, offered, replayed),
            generations,
            {} if is_step or space is None else await self._steps(repository, space, told),
            self._letters(told),
        )

    async def _generations(self, repository: IdempotencyRepository, told: Named) -> dict[int, Found]:
        keys = generations_of(told.unit)
        found = await read(repository, [key for key in keys if key != told.full])
        return {keys.index(key): record for key, record in found.items()}

    async def _steps(self, repository: IdempotencyRepository, space: KeySpace, told: Named) -> dict[int, Found]:
        return await steps_of(repository, space, told.full)

    def _letters(self, told: Named) -> str:
        kafka = self._settings.kafka
        return f"{kafka.topic_prefix}{told.event_type}{kafka.dead_letter_suffix}" if told.event_type else ""

    def _config(self, scope: str) -> IdempotencyConfig:
        own = (service.config for service in self._services if service.name == scope)
        return next((config for config in own if config is not None), self._settings.idempotency_for(scope))

    def _outlook(self, told: Named, config: IdempotencyConfig) -> Outlook:
        """What a hashed key was made of cannot be told; most are made of events."""
        by_worker = bool(told.how or told.digest)
        isolates = by_worker and self._settings.service(told.scope).isolation_share > 0
        return Outlook(config, by_worker=by_worker, isolates=isolates)

    def _absent(self, service: str, handler: str, event_type: str, key: str) -> Absent:
        return Absent(service, handler, event_type, key, Outlook(self._config(service)).of(None))

    def _unguarded(self, service: str, handler: str, event_type: str) -> Absent:
        return Absent(service, handler, event_type, "", "it would be handled: this handler is not guarded")


async def _generation(execution: GuardedExecution, judgement: ReplayDecision) -> int:
    """The generation in which a service would handle a message with these replay headers."""
    claim = judgement.unproven
    if claim is None or not asks_for(claim, execution):
        return judgement.generation
    return claim.generation if await follows_a_failure(execution, claim.generation) else 0


def _record_of_letter(message: Record) -> str:
    """The full key that a dead letter names; empty for a message that is none."""
    try:
        return record_key_of(message)
    except ApplicationError:
        return ""


def _words_of(who: Identity) -> str:
    return f"{who.event_type}:{who.event_id}" if who.event_type else who.event_id

"""Visit all states of a machine, shortest paths first, and record the path to each."""

from __future__ import annotations

import gc
import struct
import time
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from tests.model.state import Move, Rule, State, Step
from tests.model.surroundings import Actor, Machine

NOWHERE = 0xFFFFFFFF
"""The predecessor of the first state."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """The shortest path to a broken rule."""

    rule: Rule
    start: State
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Exploration:
    """The result of an exploration."""

    states: int
    steps: int
    """Number of transitions between states."""
    depth: int
    """Number of steps to the farthest state."""
    seconds: float
    counterexample: Counterexample | None = None


def explore(
    machine: Machine, *, look_for: Collection[Rule] = tuple(Rule), at_most: int = 50_000_000, remember: bool = True
) -> Exploration:
    """Visit every reachable state.

    Args:
        look_for: Stop at the first violation of one of these rules; paths that break another rule are not continued.
        at_most: Maximum number of states; more raise MemoryError.
        remember: Compute the steps of an actor once for all states that look the same to it.
    """
    begun = time.perf_counter()
    with _without_garbage_collection():
        walk = _Walk(machine, remember=remember)
        end = walk.to_the_end(frozenset(look_for), at_most)
        found = None if end is None else walk.counterexample(*end)
    return Exploration(len(walk.packed), walk.steps, walk.depth, time.perf_counter() - begun, found)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    # There are millions of tuples without cycles; searching for cycles would take a third of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_Parts: TypeAlias = tuple[int, ...]
"""A state as the numbers of its parts: each worker, each key, and the rest."""


class _Next(NamedTuple):
    """A step as the parts that it changes."""

    changes: tuple[tuple[int, int], ...]
    """Index of each changed part, and its new number."""
    is_fault: bool
    broken: Rule | None


class _Shelf:
    """Numbers the parts of states, since there are few parts and many states."""

    def __init__(self, start: State) -> None:
        self.workers = len(start.workers)
        self.size = self.workers + len(start.keys) + 1
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._parts: list[tuple[Any, ...]] = []

    def parts_of(self, state: State) -> _Parts:
        return tuple(map(self._number, (*state.workers, *state.keys, state[2:])))

    def state_of(self, numbers: _Parts) -> State:
        parts: list[Any] = [self._parts[number] for number in numbers]
        return State(tuple(parts[: self.workers]), tuple(parts[self.workers : -1]), *parts[-1])

    def part(self, number: int) -> tuple[Any, ...]:
        return self._parts[number]

    def _number(self, part: tuple[Any, ...]) -> int:
        number = self._numbers.get(part)
        if number is None:
            number = self._numbers[part] = len(self._parts)
            self._parts.append(part)
        return number

    def places_of(self, actor: Actor) -> tuple[int, ...]:
        """Return the indexes of the parts that an actor depends on."""
        places = [] if actor.worker is None else [actor.worker]
        places += [] if actor.key is None else [self.workers + actor.key]
        return (*places, self.size - 1)


@dataclass(slots=True)
class _Walk:
    """An exploration; states are numbered in the order of discovery."""

    machine: Machine
    remember: bool
    shelf: _Shelf = field(init=False)
    bytes_of: struct.Struct = field(init=False)
    numbers: dict[bytes, int] = field(default_factory=dict)
    packed: list[bytes] = field(default_factory=list)
    came_from: array[int] = field(default_factory=lambda: array("I"))
    leads_to: array[int] = field(default_factory=lambda: array("I"))
    """Targets of fault-free steps, state by state."""
    ends_at: array[int] = field(default_factory=lambda: array("I"))
    """End of the targets of each state in `leads_to`."""
    can_settle: bytearray = field(default_factory=bytearray)
    steps: int = 0
    depth: int = 0
    _views: list[tuple[int, Callable[[_Parts], _Parts]]] = field(init=False)
    _rests: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    _memory: dict[tuple[int, _Parts], tuple[_Next, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start = self.machine.setup.start()
        self.shelf = _Shelf(start)
        self.bytes_of = struct.Struct(f">{self.shelf.size}I")
        self._views = [
            (number, itemgetter(*self.shelf.places_of(actor))) for number, actor in enumerate(self.machine.actors)
        ]
        self._add(self.bytes_of.pack(*self.shelf.parts_of(start)), NOWHERE)

    def _add(self, packed: bytes, came_from: int) -> int:
        number = self.numbers[packed] = len(self.packed)
        self.packed.append(packed)
        self.came_from.append(came_from)
        return number

    def to_the_end(self, look_for: frozenset[Rule], at_most: int) -> tuple[int, Rule] | None:
        """Visit all states; return the first state that breaks a rule, and the rule."""
        end_of_level = current = 0
        while current < len(self.packed):
            if current == end_of_level:
                self.depth, end_of_level = self.depth + (current > 0), len(self.packed)
            broken = self._visit(current, look_for)
            if broken is not None:
                self.depth += 1
                return broken
            if len(self.packed) > at_most:
                raise MemoryError(f"more than {at_most} states")
            current += 1
        stuck = self._first_stuck() if Rule.STUCK in look_for else -1
        return None if stuck < 0 else (stuck, Rule.STUCK)

    def _visit(self, current: int, look_for: frozenset[Rule]) -> tuple[int, Rule] | None:
        parts = self.bytes_of.unpack(self.packed[current])
        is_end, is_broken = self._about(parts[-1])
        self.can_settle.append(is_end or is_broken)
        pack, numbers = self.bytes_of.pack, self.numbers
        for changes, is_fault, broken in () if is_broken else self._steps_from(parts):
            after = list(parts)
            for place, part in changes:
                after[place] = part
            packed = pack(*after)
            number = numbers.get(packed)
            self.steps += 1
            if number is None:
                number = self._add(packed, current)
                if broken is not None and broken in look_for:
                    return number, broken
            if not is_fault:
                self.leads_to.append(number)
        self.ends_at.append(len(self.leads_to))
        return None

    def _about(self, rest: int) -> tuple[bool, bool]:
        """Return whether everything is settled, and whether a rule is broken."""
        about = self._rests.get(rest)
        if about is None:
            partitions, *_, broken = self.shelf.part(rest)
            about = self._rests[rest] = self.machine.all_settled(partitions), broken is not None
        return about

    # Steps of actors, computed once for all states that look the same to them

    def _steps_from(self, parts: _Parts) -> Iterator[_Next]:
        memory = self._memory
        for number, look in self._views:
            view = (number, look(parts))
            steps = memory.get(view)
            if steps is None:
                steps = self._worked_out(number, parts)
                if self.remember:
                    memory[view] = steps
            yield from steps

    def _worked_out(self, actor: int, parts: _Parts) -> tuple[_Next, ...]:
        found = []
        for step, state in self.machine.actors[actor].steps(self.shelf.state_of(parts)):
            after = self.shelf.parts_of(state)
            changes = tuple(
                (place, part) for place, (part, before) in enumerate(zip(after, parts, strict=True)) if part != before
            )
            if changes:
                assert {place for place, _ in changes} <= set(self.shelf.places_of(self.machine.actors[actor]))
                found.append(_Next(changes, step.is_fault, state.broken))
        return tuple(found)

    # After the exploration

    def _first_stuck(self) -> int:
        """Return the first state from which no fault-free path settles everything; -1 if there is none."""
        leads_to, ends_at, can_settle = self.leads_to, self.ends_at, self.can_settle
        changed = True
        while changed:
            changed = False
            # Backwards, since final states were found last: this takes only a few rounds.
            end = len(leads_to)
            for number in range(len(can_settle) - 1, -1, -1):
                begin = ends_at[number - 1] if number else 0
                if not can_settle[number] and any(can_settle[place] for place in leads_to[begin:end]):
                    can_settle[number] = changed = True
                end = begin
        return can_settle.find(0)

    def counterexample(self, number: int, rule: Rule) -> Counterexample:
        """Return the path to a state, recomputing its steps."""
        way = [self._state(number)]
        while (number := self.came_from[number]) != NOWHERE:
            way.append(self._state(number))
        way.reverse()
        moves = tuple((self._step_between(before, after), after) for before, after in pairwise(way))
        return Counterexample(rule, way[0], moves)

    def _state(self, number: int) -> State:
        return self.shelf.state_of(self.bytes_of.unpack(self.packed[number]))

    def _step_between(self, before: State, after: State) -> Step:
        return next(step for step, state in self.machine.steps(before) if state == after)

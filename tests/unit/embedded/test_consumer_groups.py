"""The groups of the embedded Kafka, without any socket."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from integr8s_idem.embedded.consumer_groups import (
    ILLEGAL_GENERATION,
    INCONSISTENT_PROTOCOL,
    REBALANCE_IN_PROGRESS,
    UNKNOWN_MEMBER,
    Group,
    GroupState,
    Joined,
)

RANGE = [("range", b"topics")]


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group("billing")
    yield made
    made.close()


def join(group: Group, member: str = "", *, session: float = 30, rebalance: float = 30) -> asyncio.Task[Joined]:
    joining = group.join(member, "client", RANGE, session_seconds=session, rebalance_seconds=rebalance)
    return asyncio.create_task(joining)


async def pair(group: Group, *, session: float = 30, rebalance: float = 30) -> tuple[Joined, Joined]:
    """Leader and follower of one generation, both joined, none synced."""
    first = await join(group, session=session, rebalance=rebalance)
    second = join(group, session=session, rebalance=rebalance)
    await until(lambda: len(group.members) == 2)
    leader = await join(group, first.member, session=session, rebalance=rebalance)
    return leader, await second


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - a group tells nobody but its members
            await asyncio.sleep(0.01)


async def test_the_first_member_immediately_leads_a_generation(group: Group) -> None:
    joined = await join(group)

    assert joined.leader == joined.member
    assert joined.members == ((joined.member, b"topics"),)
    assert group.state is GroupState.SYNCING


async def test_a_follower_that_syncs_after_the_leader_gets_its_assignment(group: Group) -> None:
    leader, follower = await pair(group)
    parts = [(leader.member, b"0"), (follower.member, b"1")]

    first = await group.sync(leader.member, leader.generation, parts)
    second = await group.sync(follower.member, follower.generation, [])

    assert (first.assignment, second.assignment) == (b"0", b"1")


async def test_a_follower_that_syncs_before_the_leader_waits_for_it(group: Group) -> None:
    leader, follower = await pair(group)

    waiting = asyncio.create_task(group.sync(follower.member, follower.generation, []))
    await asyncio.sleep(0)
    assert not waiting.done()
    await group.sync(leader.member, leader.generation, [(follower.member, b"1")])

    assert (await waiting).assignment == b"1"


async def test_a_leader_whose_session_times_out_is_replaced(group: Group) -> None:
    leader, follower = await pair(group, session=0.2)
    await group.sync(leader.member, leader.generation, [])

    await until(lambda: group.check(follower.member, follower.generation) == REBALANCE_IN_PROGRESS)
    rejoined = await join(group, follower.member)

    assert group.members == (follower.member,)
    assert rejoined.leader == follower.member
    assert group.check(leader.member, leader.generation) == UNKNOWN_MEMBER


async def test_a_replacement_joins_before_the_session_of_the_dead_leader_times_out(group: Group) -> None:
    dead = await join(group, session=0.2)
    await group.sync(dead.member, dead.generation, [])

    replacement = await asyncio.wait_for(join(group), timeout=5)

    assert replacement.leader == replacement.member
    assert group.members == (replacement.member,)


async def test_a_member_that_does_not_rejoin_in_time_is_removed(group: Group) -> None:
    leader, follower = await pair(group, rebalance=0.2)

    rejoined = await join(group, leader.member, rebalance=0.2)

    assert group.members == (rejoined.member,)
    assert group.check(follower.member, follower.generation) == UNKNOWN_MEMBER


async def test_a_commit_of_an_older_generation_is_refused(group: Group) -> None:
    first = await join(group)
    again = await join(group, first.member)
    await group.sync(again.member, again.generation, [])

    assert group.check_commit(first.member, first.generation) == ILLEGAL_GENERATION
    assert group.check_commit(again.member, again.generation) == 0


async def test_members_can_commit_during_a_rebalance(group: Group) -> None:
    member = await join(group)
    await group.sync(member.member, member.generation, [])
    newcomer = join(group)
    await until(lambda: len(group.members) == 2)

    assert group.check(member.member, member.generation) == REBALANCE_IN_PROGRESS
    assert group.check_commit(member.member, member.generation) == 0
    newcomer.cancel()


async def test_commits_without_a_member_are_accepted_only_in_an_empty_group(group: Group) -> None:
    assert group.check_commit("", -1) == 0

    await join(group)

    assert group.check_commit("", -1) == UNKNOWN_MEMBER


async def test_a_member_that_leaves_triggers_a_rebalance(group: Group) -> None:
    leader, follower = await pair(group)
    await group.sync(leader.member, leader.generation, [])

    group.leave(leader.member)
    rejoined = await join(group, follower.member)

    assert group.members == (rejoined.member,)


async def test_members_without_a_common_assignor_are_refused(group: Group) -> None:
    await join(group)

    answer = await group.join("", "client", [("sticky", b"")], session_seconds=30, rebalance_seconds=30)

    assert answer.error == INCONSISTENT_PROTOCOL
    assert len(group.members) == 1

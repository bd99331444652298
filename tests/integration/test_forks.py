"""A manager in a forked process works if the parent has not used it; otherwise its error says what to do."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="os.fork is not available")

SCRIPT = """
import asyncio, os, signal, threading
from integr8s_idem import IdempotencyConfig, IdempotencyManager, MemoryIdempotencyRepository, idempotent

manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")

@idempotent(key="{name}", manager=manager)
def plain(name: str) -> str:
    return f"{name} was done"

async def done() -> str:
    return "done"

def in_child(call):
    reading, writing = os.pipe()
    if os.fork() == 0:
        signal.alarm(10)  # ends a child that hangs
        try:
            result = str(call())
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    result = os.read(reading, 65536).decode()
    os.wait()
    print(result or "the child hung")

"""


def run(lines: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT + textwrap.dedent(lines)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "used",
    ["asyncio.run(manager.run('used', done))", "plain('used')"],
    ids=["used by a coroutine", "used by a plain function"],
)
@pytest.mark.parametrize(
    "call",
    [
        "plain('asked')",
        "plain('used')",
        "asyncio.run(manager.run('asked', done))",
        "asyncio.run(manager.get('used'))",
        "asyncio.run(manager.acquire_batch(['asked']))",
        "asyncio.run(manager.in_scope('payments').run('asked', done))",
    ],
)
def test_a_manager_used_by_the_parent_is_refused_in_the_child(used: str, call: str) -> None:
    result, after = run(f"""
        {used}
        in_child(lambda: {call})
        print(plain("after"))
    """)

    assert result.startswith("ApplicationError: ")
    assert "the manager of billing was used before this process was forked" in result
    assert "Make a manager and a store in each child" in result
    assert after == "after was done"


@pytest.mark.parametrize(
    "call",
    [
        "cached.may_start(reserved)",
        "cached.run('used', done)",
        "cached.acquire_batch([])",
        "cached.confirm_batch([])",
        "cached.release_batch([])",
    ],
)
def test_calls_that_need_no_store_are_refused_in_the_child_of_a_manager_used_by_the_parent(call: str) -> None:
    [result] = run(f"""
        config = IdempotencyConfig(local_memory_keys=10)
        cached = IdempotencyManager(config, MemoryIdempotencyRepository(), scope="billing")

        async def use():
            await cached.run("used", done)
            return (await cached.acquire_batch(["held"]))["held"]

        reserved = asyncio.run(use())
        in_child(lambda: asyncio.run({call}))
    """)

    assert result.startswith("ApplicationError: the manager of billing was used before this process was forked")


def test_closing_a_manager_in_the_child_leaves_the_pending_writes_to_the_parent() -> None:
    result, after = run("""
        class Slow(MemoryIdempotencyRepository):
            async def complete(self, completions):
                await asyncio.sleep(0.2)
                return await super().complete(completions)

        slow = IdempotencyManager(repository=Slow(), scope="billing")

        async def fork_while_an_outcome_is_written():
            running = asyncio.create_task(slow.run("used", done))
            await asyncio.sleep(0.1)
            running.cancel()
            await asyncio.wait({running})
            if os.fork() == 0:
                signal.alarm(10)
                asyncio.run(slow.close())
                print("closed", flush=True)
                os._exit(0)
            os.wait()
            await slow.close()
            print((await slow.get("used")).status.name)

        asyncio.run(fork_while_an_outcome_is_written())
    """)

    assert (result, after) == ("closed", "COMPLETED")


def test_a_manager_used_in_a_running_loop_of_the_parent_is_refused_in_the_child() -> None:
    result, after = run("""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(manager.run("used", done), loop).result()
        in_child(lambda: plain("asked"))
        print(plain("after"))
    """)

    assert result.startswith("ApplicationError: the manager of billing was used before this process was forked")
    assert after == "after was done"


@pytest.mark.parametrize("call", ["plain('asked')", "asyncio.run(manager.run('asked', done))"])
def test_an_unused_manager_works_in_the_child(call: str) -> None:
    result, after = run(f"""
        in_child(lambda: {call})
        print(plain("after"))
    """)

    assert result in ("asked was done", "done")
    assert after == "after was done"


def test_a_manager_made_in_the_child_works_there() -> None:
    [result] = run("""
        plain("used")

        def own():
            own_manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")
            return idempotent(key="{name}", manager=own_manager)(lambda name: f"{name} was done")("asked")

        in_child(own)
    """)

    assert result == "asked was done"


def test_a_guarded_function_that_forks_and_returns_in_the_child_gets_an_error() -> None:
    result, returned = run("""
        reading, writing = os.pipe()

        @idempotent(key="{name}", manager=manager)
        def fork(name: str) -> int:
            child = os.fork()
            if child == 0:
                signal.alarm(10)
            return child

        try:
            child = fork("fork")
        except Exception as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        print(os.read(reading, 65536).decode() or "the child hung")
        print(child > 0)
    """)

    assert result.startswith("ApplicationError: a guarded function forked the process")
    assert "os._exit" in result
    assert returned == "True"

"""A manager in a process that was forked: it works where it was not used before, and else says what to do."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="os.fork is not available")

SCRIPT = """
import asyncio, os, signal, threading
from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository, idempotent

manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")

@idempotent(key="{name}", manager=manager)
def plain(name: str) -> str:
    return f"{name} was done"

async def done() -> str:
    return "done"

def in_child(ask):
    reading, writing = os.pipe()
    if os.fork() == 0:
        signal.alarm(10)  # ends a child that hangs
        try:
            said = str(ask())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 65536).decode()
    os.wait()
    print(said or "the child hung")

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
    "ask",
    [
        "plain('asked')",
        "plain('used')",
        "asyncio.run(manager.run('asked', done))",
        "asyncio.run(manager.get('used'))",
        "asyncio.run(manager.acquire_batch(['asked']))",
        "asyncio.run(manager.in_scope('payments').run('asked', done))",
    ],
)
def test_a_manager_that_the_parent_has_used_is_refused_in_the_child(used: str, ask: str) -> None:
    said, after = run(f"""
        {used}
        in_child(lambda: {ask})
        print(plain("after"))
    """)

    assert said.startswith("ApplicationError: ")
    assert "the manager of billing was used before this process was forked" in said
    assert "Make a manager and a store in each child" in said
    assert after == "after was done"


def test_a_manager_that_the_parent_uses_in_a_running_loop_is_refused_in_the_child() -> None:
    said, after = run("""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(manager.run("used", done), loop).result()
        in_child(lambda: plain("asked"))
        print(plain("after"))
    """)

    assert said.startswith("ApplicationError: the manager of billing was used before this process was forked")
    assert after == "after was done"


@pytest.mark.parametrize("ask", ["plain('asked')", "asyncio.run(manager.run('asked', done))"])
def test_a_manager_that_nobody_has_used_works_in_the_child(ask: str) -> None:
    said, after = run(f"""
        in_child(lambda: {ask})
        print(plain("after"))
    """)

    assert said in ("asked was done", "done")
    assert after == "after was done"


def test_a_manager_made_in_the_child_works_there() -> None:
    [said] = run("""
        plain("used")

        def own():
            own_manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")
            return idempotent(key="{name}", manager=own_manager)(lambda name: f"{name} was done")("asked")

        in_child(own)
    """)

    assert said == "asked was done"


def test_a_guarded_function_that_forks_and_returns_in_the_child_gets_an_error() -> None:
    said, returned = run("""
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

    assert said.startswith("ApplicationError: a guarded function forked the process")
    assert "os._exit" in said
    assert returned == "True"

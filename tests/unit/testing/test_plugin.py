"""The pytest plugin in a separate pytest process, with pytest-asyncio and with anyio."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from integr8s_idem.testing.faults import CRASHES, FAULTS
from tests.support.pytest_options import WITHOUT_PLUGINS

ROOT = Path(__file__).parents[3]

CONFTEST = f"""
import pytest
from pathlib import Path
from examples.billing.payments import Payments, Receipt
from examples.billing.workers import platform
from integr8s_idem.testing import EmbeddedHarness, WorkerHarness

pytestmark = pytest.mark.slow

pytest_plugins = ["integr8s_idem.testing.plugin"]
SETTINGS = Path({str(ROOT / "examples" / "billing" / "settings.toml")!r})

class FakePayments:
    def __init__(self, knows_keys):
        self.charges = []
        self.receipts = {{}}
        self.knows_keys = knows_keys

    async def charge(self, order_id, amount, *, idempotency_key):
        if not (self.knows_keys and idempotency_key in self.receipts):
            self.charges.append(order_id)
        self.receipts[idempotency_key] = Receipt(id="r")
        return self.receipts[idempotency_key]

@pytest.fixture
def payments(request):
    return FakePayments(knows_keys="careless" not in request.node.name)

@pytest.fixture
def harness(payments):
    return WorkerHarness(platform, "billing", fakes={{Payments: payments}}, settings=SETTINGS)

@pytest.fixture
def silent():
    return WorkerHarness(platform, "audit", settings=SETTINGS)

@pytest.fixture(scope="module")
def shared():
    return WorkerHarness(platform, "audit", settings=SETTINGS)

@pytest.fixture
def embedded(embedded_servers, payments):
    return EmbeddedHarness(platform, servers=embedded_servers, fakes={{Payments: payments}}, settings=SETTINGS)

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""

TESTS = """
import pytest
from decimal import Decimal
from examples.billing.handlers import OrderPaid, OrderPlaced

ORDER, PAID = OrderPlaced(order_id="1", amount=Decimal(3)), OrderPaid(order_id="1", receipt="r")
pytestmark = pytest.mark.MODE

async def test_redelivery(harness, payments):
    await harness.publish(ORDER)
    await harness.redeliver_all()
    assert payments.charges == ["1"]

class TestInAClass:
    async def test_redelivery(self, harness, payments):
        await test_redelivery(harness, payments)

async def test_faults(harness, payments, fault):
    harness.suffer(fault)
    await harness.publish(ORDER)
    assert payments.charges == ["1"]

async def test_careless_faults(harness, payments, fault):
    await test_faults(harness, payments, fault)

async def test_crashes(silent, crash_point):
    silent.crash_at(crash_point)
    await silent.publish(PAID)
    assert silent.runs

async def test_crash_by_name(silent):
    silent.crash_at("before_publish")
    await silent.publish(PAID)

async def test_shared(shared):
    await shared.publish(PAID)
    assert len(shared.runs) == 1

async def test_shared_again(shared):
    await test_shared(shared)

async def test_sockets(embedded, payments):
    await embedded.publish(ORDER)
    await embedded.redeliver_all()
    assert payments.charges == ["1"]
    assert (embedded.handled, embedded.duplicates) == (2, 1)

async def test_sockets_again(embedded, payments):
    await test_sockets(embedded, payments)
"""

PLAIN = """
def test_plain(harness):
    pass
"""

GENERATED = """
from hypothesis import HealthCheck, given, settings, strategies

@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=strategies.integers())
async def test_generated(harness, number):
    pass
"""


@dataclass(frozen=True)
class PytestResult:
    """The result of a pytest run."""

    outcomes: Mapping[str, str]
    """Outcomes by test name, with parameters."""
    output: str

    def of(self, test: str) -> Counter[str]:
        return Counter(outcome for name, outcome in self.outcomes.items() if name.partition("[")[0] == test)


def run(folder: Path, tests: str, *options: str) -> PytestResult:
    """Run a separate pytest process in which warnings are errors."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    quiet = (*WITHOUT_PLUGINS, "-W", "error", "-v", "-rs")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *quiet, *options],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert not ran.stderr, ran.stderr
    return PytestResult(
        dict(re.findall(r"^test_it\.py::(\S+) (PASSED|FAILED|SKIPPED|ERROR)", ran.stdout, re.M)), ran.stdout
    )


STRICT = ("-o", "asyncio_mode=strict", "-o", "asyncio_default_fixture_loop_scope=function")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> PytestResult:
    """The result with pytest-asyncio in strict mode."""
    return run(tmp_path_factory.mktemp("asyncio"), TESTS.replace("MODE", "asyncio") + PLAIN + GENERATED, *STRICT)


def test_a_harness_fixture_is_entered_for_its_test(result: PytestResult) -> None:
    assert result.of("test_redelivery") == {"PASSED": 1}
    assert result.of("TestInAClass::test_redelivery") == {"PASSED": 1}


def test_a_harness_fixture_of_a_module_is_entered_for_each_of_its_tests(result: PytestResult) -> None:
    assert result.of("test_shared") + result.of("test_shared_again") == {"PASSED": 2}


def test_a_repeatable_handler_passes_with_every_fault(result: PytestResult) -> None:
    assert result.of("test_faults") == {"PASSED": len(FAULTS)}


def failed(result: PytestResult, test: str) -> Sequence[str]:
    return [
        name.removeprefix(test) for name, how in result.outcomes.items() if name.startswith(test) and how == "FAILED"
    ]


def test_a_handler_that_is_not_repeatable_fails_with_faults_between_effect_and_record(result: PytestResult) -> None:
    between = ["crash-after_handler", "crash-before_publish", "crash-after_publish", "crash-before_complete"]

    assert failed(result, "test_careless_faults") == [f"[{name}]" for name in (*between, "stall-after_handler")]


def test_unreached_points_are_skipped_as_parameters_but_fail_by_name(result: PytestResult) -> None:
    """The audit service is not guarded: it reserves, completes and publishes nothing."""
    assert result.of("test_crashes") == {"PASSED": len(CRASHES) - 6, "SKIPPED": 6}
    assert result.of("test_crash_by_name") == {"FAILED": 1}
    assert "NotReachedError: not reached: crash at before_publish; reached points: on_assign" in result.output


def test_a_plain_test_function_with_a_harness_fails(result: PytestResult) -> None:
    assert result.of("test_plain") == {"FAILED": 1}
    assert "a test that uses a harness must be an async function" in result.output


def test_a_generated_test_with_a_harness_fails_and_says_what_works(result: PytestResult) -> None:
    assert result.of("test_generated") == {"FAILED": 1}
    assert "a test with @given cannot have a harness as a fixture" in result.output
    assert "write `async with WorkerHarness(...) as harness:` in the test" in result.output


def test_tests_with_embedded_harnesses_share_the_servers(result: PytestResult) -> None:
    assert result.of("test_sockets") + result.of("test_sockets_again") == {"PASSED": 2}


def test_the_plugin_works_with_anyio(tmp_path: Path) -> None:
    result = run(tmp_path, TESTS.replace("MODE", "anyio"), "-p", "no:asyncio", "-k", "redelivery or after_handler")

    assert result.of("test_redelivery") + result.of("TestInAClass::test_redelivery") == {"PASSED": 2}
    assert failed(result, "test_careless_faults") == ["[crash-after_handler]", "[stall-after_handler]"]


def test_the_plugin_is_not_an_entry_point() -> None:
    """An entry point would be imported by every pytest run in the environment."""
    assert not [each for each in entry_points(group="pytest11") if each.value.startswith("integr8s_idem")]

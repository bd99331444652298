"""Loading of `MODULE:APP`, and its error messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from integr8s_idem.cli.application_loader import load_application, select_services
from integr8s_idem.errors import ApplicationError

PLATFORM = """
    from integr8s_idem.runtime import Platform, Service

    platform = Platform(Service("billing", providers=[]), Service("k8s-worker", providers=[]))
    number = 3
"""


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty working directory; modules imported from it are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def written(name: str, text: str) -> None:
    """Write a module to the working directory."""
    file = Path(f"{name}.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(dedent(text))


def refusal(target: str) -> str:
    """Return the error message for `target`."""
    with pytest.raises(ApplicationError) as caught:
        load_application(target)
    return caught.value.reason


def test_an_application_is_found_in_the_working_directory() -> None:
    written("shop_app/workers", PLATFORM)

    assert list(load_application("shop_app.workers:platform").services) == ["billing", "k8s-worker"]


def test_an_invalid_target_is_refused_with_the_expected_format() -> None:
    assert refusal("shop_app") == (
        'invalid application "shop_app"; write MODULE:APP, as in billing.workers:platform; '
        "did you mean shop_app:platform?"
    )


def test_a_path_is_refused_with_the_module_to_use() -> None:
    assert refusal("./shop_app/workers.py:shop").endswith("did you mean shop_app.workers:shop?")


def test_a_missing_module_is_reported_with_the_folder(tmp_path: Path) -> None:
    message = refusal("shop_nowhere.workers:platform")

    assert message.startswith(f'module "shop_nowhere" not found from {tmp_path}; run from the folder that contains')


def test_a_missing_submodule_is_reported_with_its_full_name() -> None:
    written("shop_app/workers", PLATFORM)

    assert refusal("shop_app.handlers:platform").startswith('module "shop_app.handlers" not found')


def test_a_missing_attribute_is_reported_with_the_platform_of_the_module() -> None:
    written("shop_app", PLATFORM)

    assert refusal("shop_app:plattform") == ('module "shop_app" has no "plattform"; did you mean shop_app:platform?')


def test_an_object_that_is_not_a_platform_is_refused() -> None:
    written("shop_app", PLATFORM)

    assert refusal("shop_app:number") == (
        "shop_app:number is an int, not a Platform; write number = Platform(Service(…), …)"
    )


def test_the_platform_class_is_refused() -> None:
    written("shop_app", PLATFORM)

    assert "not a Platform" in refusal("shop_app:Platform")


def test_a_failing_import_is_reported_with_the_applications_traceback() -> None:
    written("shop_app", "import json\n\n\ndef rates():\n    return json.loads('{')\n\n\nrates()\n")

    message = refusal("shop_app:platform")

    assert message.startswith('module "shop_app" cannot be imported:\n')
    assert 'shop_app.py", line 5, in rates' in message
    assert "json.decoder.JSONDecodeError: Expecting property name" in message
    assert "decoder.py" not in message
    assert message.endswith("To do: fix the application and try again")


def test_a_missing_dependency_is_reported() -> None:
    written("shop_app", "import shop_dependency")

    message = refusal("shop_app:platform")

    assert "ModuleNotFoundError: No module named 'shop_dependency'" in message
    assert message.endswith('To do: install "shop_dependency", or fix the import')


def test_a_module_that_exits_is_refused() -> None:
    written("shop_app", "raise SystemExit(0)")

    assert "exits when it is imported" in refusal("shop_app:platform")


def test_an_unknown_service_lists_the_known_ones() -> None:
    written("shop_app", PLATFORM)
    application = load_application("shop_app:platform")

    with pytest.raises(ApplicationError) as caught:
        select_services(application, ["biling"])

    assert (
        caught.value.reason == 'unknown service "biling" (did you mean "billing"?); known services: billing, k8s-worker'
    )


def test_a_service_named_twice_runs_once_and_all_run_by_default() -> None:
    written("shop_app", PLATFORM)
    application = load_application("shop_app:platform")

    assert [service.name for service in select_services(application, ["billing", "billing"])] == ["billing"]
    assert [service.name for service in select_services(application, [])] == ["billing", "k8s-worker"]


def test_configuration_errors_of_the_application_have_no_traceback() -> None:
    written("shop_app", PLATFORM.replace("k8s-worker", "billing"))

    message = refusal("shop_app:platform")

    assert message.startswith("two services are named billing")
    assert "\n" not in message

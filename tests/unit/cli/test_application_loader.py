"""What `MODULE:APP` may name, and what is said where it names nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from integr8s_idem.cli.application_loader import chosen_services, load_application
from integr8s_idem.errors import ApplicationError

PLATFORM = """
    from integr8s_idem.runtime import Platform, Service

    platform = Platform(Service("billing", providers=[]), Service("k8s-worker", providers=[]))
    number = 3
"""


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty working directory; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def written(name: str, text: str) -> None:
    """A module in the working directory."""
    file = Path(f"{name}.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(dedent(text))


def refusal(target: str) -> str:
    """What is said about `target`."""
    with pytest.raises(ApplicationError) as caught:
        load_application(target)
    return caught.value.reason


def test_an_application_is_found_in_the_working_directory() -> None:
    written("shop_app/workers", PLATFORM)

    assert list(load_application("shop_app.workers:platform").services) == ["billing", "k8s-worker"]


def test_a_target_without_an_application_says_how_to_write_one() -> None:
    assert refusal("shop_app") == (
        '"shop_app" names no application; write MODULE:APP, as in billing.workers:platform; '
        "perhaps shop_app:platform is meant"
    )


def test_a_path_is_turned_into_a_module() -> None:
    assert refusal("./shop_app/workers.py:shop").endswith("perhaps shop_app.workers:shop is meant")


def test_a_module_that_is_not_there_says_where_it_was_sought(tmp_path: Path) -> None:
    said = refusal("shop_nowhere.workers:platform")

    assert said.startswith(f'no module "shop_nowhere" is found from {tmp_path}; run from the folder that holds')


def test_a_missing_submodule_is_named_whole() -> None:
    written("shop_app/workers", PLATFORM)

    assert refusal("shop_app.handlers:platform").startswith('no module "shop_app.handlers" is found')


def test_a_missing_attribute_leads_to_the_platform_of_the_module() -> None:
    written("shop_app", PLATFORM)

    assert refusal("shop_app:plattform") == ('module "shop_app" has no "plattform"; perhaps shop_app:platform is meant')


def test_what_is_no_platform_is_refused() -> None:
    written("shop_app", PLATFORM)

    assert refusal("shop_app:number") == (
        "shop_app:number is an int, not a Platform; write number = Platform(Service(…), …)"
    )


def test_a_class_is_not_taken_for_its_instance() -> None:
    written("shop_app", PLATFORM)

    assert "not a Platform" in refusal("shop_app:Platform")


def test_an_import_that_fails_inside_shows_its_own_last_lines() -> None:
    written("shop_app", "import json\n\n\ndef rates():\n    return json.loads('{')\n\n\nrates()\n")

    said = refusal("shop_app:platform")

    assert said.startswith('module "shop_app" cannot be imported:\n')
    assert 'shop_app.py", line 5, in rates' in said
    assert "json.decoder.JSONDecodeError: Expecting property name" in said
    assert "decoder.py" not in said
    assert said.endswith("To do: mend the application and try again")


def test_a_dependency_that_is_not_installed_is_named() -> None:
    written("shop_app", "import shop_dependency")

    said = refusal("shop_app:platform")

    assert "ModuleNotFoundError: No module named 'shop_dependency'" in said
    assert said.endswith('To do: install "shop_dependency", or mend the import')


def test_a_module_that_ends_the_program_is_refused() -> None:
    written("shop_app", "raise SystemExit(0)")

    assert "ends the program when it is imported" in refusal("shop_app:platform")


def test_an_unknown_service_lists_the_known_ones() -> None:
    written("shop_app", PLATFORM)
    application = load_application("shop_app:platform")

    with pytest.raises(ApplicationError) as caught:
        chosen_services(application, ["biling"])

    assert caught.value.reason == 'no service is called "biling" (did you mean "billing"?); known: billing, k8s-worker'


def test_services_named_twice_run_once_and_without_names_all_run() -> None:
    written("shop_app", PLATFORM)
    application = load_application("shop_app:platform")

    assert [service.name for service in chosen_services(application, ["billing", "billing"])] == ["billing"]
    assert [service.name for service in chosen_services(application, [])] == ["billing", "k8s-worker"]


def test_what_the_application_builds_wrongly_is_said_without_a_traceback() -> None:
    written("shop_app", PLATFORM.replace("k8s-worker", "billing"))

    said = refusal("shop_app:platform")

    assert said.startswith("two services are named billing")
    assert "\n" not in said

"""settings.example.toml lists every setting, and loads."""

from __future__ import annotations

import os
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from integr8s_idem.config import ServiceSettings, Settings, load_settings
from integr8s_idem.config.example import example_settings
from integr8s_idem.config.schema_shape import shape_of

EXAMPLE = Path(__file__).parents[2] / "settings.example.toml"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove settings of this machine, and run in an empty folder."""
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def uncommented(text: str) -> str:
    """Uncomment the settings that have no default."""
    return re.sub(r"(?m)^# (?=[a-z_]+ = )", "", text)


def settings_in(text: str) -> set[str]:
    """Return the names of all settings, such as `kafka.client_id` and `services.<name>.topics`."""
    return {
        f"{section}.{name}".replace("services.example.", "services.<name>.")
        for section, table in tomllib.loads(text).items()
        for inner, settings in (table.items() if section == "services" else [("", table)])
        for name in (f"{inner}.{each}".lstrip(".") for each in settings)
    }


def stores_in(text: str) -> list[str]:
    """Return the `[store]` section of each kind; all but the first are commented out."""
    own = re.findall(r"(?ms)^\[store\]\n.*?(?=\n\n)", text)
    others = re.findall(r"(?ms)^#     \[store\]\n.*?(?=\n\n)", text)
    return [*own, *(re.sub(r"(?m)^#     ", "", block) for block in others)]


def test_the_example_file_matches_the_output_of_the_command() -> None:
    """To update the file: integr8s-idem settings example > settings.example.toml"""
    assert EXAMPLE.read_text(encoding="utf-8") == example_settings()


def test_the_example_has_exactly_the_settings_that_exist() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    shown = settings_in(uncommented(text)).union(*(settings_in(uncommented(block)) for block in stores_in(text)))

    assert shown == {".".join(path) for path in shape_of(Settings).leaves()}


@pytest.mark.parametrize("kind", ["redis", "postgresql", "sqlite", "mysql", "dynamodb", "memory"])
def test_the_example_shows_all_defaults_of_each_store_kind(kind: str) -> None:
    (block,) = [block for block in stores_in(EXAMPLE.read_text(encoding="utf-8")) if f'kind = "{kind}"' in block]
    defaults = Settings.model_validate({"store": {"kind": kind}}).store

    assert set(tomllib.loads(uncommented(block))["store"]) == set(type(defaults).model_fields)
    assert Settings.model_validate(tomllib.loads(block)).store == defaults


def test_the_example_loads_as_the_defaults() -> None:
    assert load_settings(EXAMPLE) == Settings(services={"example": ServiceSettings()})


def test_every_setting_in_the_example_has_a_description() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()

    for above, line in pairwise(lines):
        if re.match(r"(# )?[a-z_]+ = ", line):
            assert re.match(r"# \S.*\.$", above), line

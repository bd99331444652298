"""Any file and environment load as settings, or raise an error that lists all mistakes without secrets."""

from __future__ import annotations

import os
import tempfile
import traceback
from pathlib import Path
from random import Random

from integr8s_idem.config import Settings, load_settings
from integr8s_idem.config.example import example_settings
from integr8s_idem.errors import SettingsError
from tests.campaigns.figures import Figures
from tests.fuzz.claims import must
from tests.fuzz.mutators import damaged, text

CANARY = "hunter2-canary"


def _lines_by_section() -> dict[str, list[str]]:
    """Return the lines of a valid file by section, including settings without a default."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in example_settings().splitlines():
        bare = line.lstrip("# ")
        if bare.startswith("["):
            lines = found.setdefault(bare, [])
        elif " = " in bare:
            lines.append(bare.partition("  #")[0])
    return found


_LINES = _lines_by_section()
_VALUES = (
    "1", "0", "-1", "true", '"5min"', "[]", "{}", "nan", "inf", "1e400", "9" * 5_000, "0x" + "f" * 5_000, '""', "''",
    "1979-05-27", '"redis://h:99999/0"', '"a:b"', '["a", 1]', "[[1], {}]", '"' + "x" * 5_000 + '"', "[" * 3_000,
    '"\\u202e"', '"\\u0000"', "{a = {b = 1}}",
)  # fmt: skip
_SECRETS = (
    f'password = "{CANARY}"', f'sasl_password = "{CANARY}"', f'url = "redis://user:{CANARY}@h:1/0"',
    f'url = "redis://user:{CANARY}@h:port/0"', f'url = "h?password={CANARY}"', f'otlp_endpoint = "ftp://u:{CANARY}@h"',
    f'url = "redis://u:1/{CANARY}@h/0"', f'url = "redis://u:{CANARY}/0"', f'otlp_endpoint = "ftp://u:{CANARY}/1@h"',
    f'secret = "{CANARY}"', f'unsigned = "{CANARY}"',
    f'password = ["{CANARY}"]', f'pasword = "{CANARY}"', f'bootstrap_servers = "kafka://u:{CANARY}@h:1"',
)  # fmt: skip


def file_of(random: Random) -> bytes:
    """Return a settings file, from almost valid to completely invalid."""
    hostile = random.choice((0.0, 0.05, 0.3, 0.6))
    lines = []
    for section in random.sample(list(_LINES), random.randint(0, 4)):
        names = random.sample(_LINES[section], min(len(_LINES[section]), random.randint(0, 3)))
        lines += [section, *(_spoiled(random, line, hostile) for line in names)]
    raw = "\n".join(lines).encode("utf-8", "replace")
    return damaged(random, raw) if random.random() < hostile / 2 else raw


def _spoiled(random: Random, line: str, hostile: float) -> str:
    if random.random() < hostile / 2:
        return random.choice(_SECRETS)
    name, _, value = line.partition(" = ")
    if random.random() < hostile / 2:
        name = random.choice((name[:-1] or "x", name + "s", f'"{text(random, 1)}"', name.upper()))
    return f"{name} = {random.choice(_VALUES) if random.random() < hostile else value}"


def environment_of(random: Random) -> dict[str, str]:
    names = ("KAFKA", "KAFKA__CLIENT_ID", "STORE__PASSWORD", "STORE__URL", "SERVICES__A__TOPICS", "SERVICES", "X", "__")
    values = ("x", "[", "[" * 5_000, '{"a": 1, "a": 2}', '{"client_id": "a"}', "1", "\udcff")
    chosen = random.sample(names, random.choice((0, 0, 0, 1, 2)))
    variables_by_name = {f"INTEGR8S_IDEM_{name}": random.choice(values) for name in chosen}
    secrets = {"STORE__PASSWORD": CANARY, "STORE__URL": f"redis://:{CANARY}@h/{random.choice(('0', 'x'))}"}
    return variables_by_name | {
        f"INTEGR8S_IDEM_{name}": secrets[name] for name in chosen if name in secrets and random.random() < 0.5
    }


def configured(random: Random) -> Figures:
    """Load a settings file with environment variables."""
    variables = environment_of(random)
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("INTEGR8S_IDEM_")}
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(file_of(random))
        file.flush()
        os.environ.update(variables)
        try:
            settings = load_settings(Path(file.name))
        except SettingsError as error:
            shown = "".join(traceback.format_exception(error)) + repr(error)
            must(CANARY not in shown, shown)
            must(error.mistakes and len(str(error)) < 2_500 * len(error.mistakes), error)
            must(all(line.isprintable() for line in str(error).splitlines()), ascii(str(error)))
            return Figures(settings_refused=1)
        finally:
            for name in variables:
                del os.environ[name]
            os.environ.update(before)
    assert isinstance(settings, Settings)
    must(CANARY not in repr(settings) + str(settings), "the text of the settings contains a secret")
    return Figures(settings=1)

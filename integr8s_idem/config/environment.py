"""Settings from named texts: environment variables, and files in a folder of secrets.

`INTEGR8S_IDEM_STORE__PASSWORD` is `store.password`; two underscores part the names, and upper
or lower case does not count.  A service's name has hyphens where a variable cannot:
`INTEGR8S_IDEM_SERVICES__K8S_WORKER__CONCURRENCY` is `services.k8s-worker.concurrency`.
Lists are written with commas or as JSON, whole tables as JSON.  An empty text counts as not given.

pydantic-settings has sources for both, but they ignore unknown sections and stop at the first list
that is no JSON; here every name reaches the model, which refuses what it does not know.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, Final

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from integr8s_idem.config.load_context import current_reading
from integr8s_idem.config.message_text import said
from integr8s_idem.config.schema_shape import Path, Shape, shape_of
from integr8s_idem.errors import SettingsError

SECRETS_DIR: Final = "SECRETS_DIR"
"""Behind the prefix: the variable that names the folder of secrets."""
_DELIMITER: Final = "__"
_KUBERNETES_LINK: Final = re.compile(r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP).*)?)")
"""What Kubernetes tells every pod about a Service whose name starts like our prefix."""
_LARGEST_SECRET: Final = 1024 * 1024


def same_name(name: str) -> str:
    """What names that differ by case, hyphens and underscores have in common."""
    return name.lower().replace("-", "_")


def variable_name(prefix: str, path: Path) -> str:
    """The variable that sets `path`."""
    return prefix + _DELIMITER.join(path).upper().replace("-", "_")


def environment_values(settings_type: type[BaseSettings]) -> dict[str, str]:
    """The variables meant for us."""
    prefix = _prefix_of(settings_type)
    sections = {same_name(name) for name in settings_type.model_fields}
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper().startswith(prefix) and value and _is_setting(name.upper()[len(prefix) :], sections)
    }


def secret_values(settings_type: type[BaseSettings]) -> dict[str, str]:
    """The files meant for us in the folder of secrets, without the newline at their end.

    Raises:
        SettingsError: The folder or a file in it cannot be read.
    """
    prefix = _prefix_of(settings_type)
    folder = os.environ.get(prefix + SECRETS_DIR)
    if not folder:
        return {}
    return {file.name: _secret(file) for file in _secret_files(FilePath(folder), prefix)}


class NamedTexts(PydanticBaseSettingsSource):
    """Turns named texts into nested tables.  Converts nothing but lists and tables: the model does the rest."""

    def __init__(self, settings_cls: type[BaseSettings], texts: Mapping[str, str]) -> None:
        super().__init__(settings_cls)
        self._texts = texts
        self._prefix = _prefix_of(settings_cls)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Not asked by `__call__`; the base wants it."""
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        reading = current_reading()
        spoken = [self.current_state, *([reading.table] if reading else [])]
        tables: dict[str, Any] = {}
        # In order of their length: a table as JSON comes before the single settings in it.
        for name, text in sorted(self._texts.items(), key=lambda item: (len(item[0]), item[0])):
            path, shape = self._place(name, spoken)
            _put(tables, path, _decoded(text, shape))
            if reading is not None:
                reading.origins[path] = name
        return tables

    def _place(self, name: str, spoken: list[Mapping[str, Any]]) -> tuple[Path, Shape | None]:
        """The path that `name` means, spelled as the model or the file spells it."""
        shape: Shape | None = shape_of(self.settings_cls)
        path: list[str] = []
        for part in name[len(self._prefix) :].split(_DELIMITER):
            known = shape.names() if shape else []
            if shape and shape.names_are_free:
                known = [key for table in spoken for key in _keys_at(table, path)]
            spelled = next((key for key in known if same_name(key) == same_name(part)), part.lower())
            shape = shape.child(spelled) if shape else None
            path.append(spelled)
        return tuple(path), shape


def _prefix_of(settings_type: type[BaseSettings]) -> str:
    return settings_type.model_config.get("env_prefix", "").upper()


def _is_setting(name: str, sections: set[str]) -> bool:
    """Whether a variable with our prefix means a setting, right or wrong."""
    if same_name(name.partition(_DELIMITER)[0]) in sections:
        return True
    return name != SECRETS_DIR and not name.startswith("TEST_") and not _KUBERNETES_LINK.fullmatch(name)


def _secret_files(folder: FilePath, prefix: str) -> Iterator[FilePath]:
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise SettingsError(
            prefix + SECRETS_DIR,
            [said(str(folder), f"cannot be read: {error.strerror}; name a folder, or unset the variable")],
        ) from None
    for file in files:
        if file.name.upper().startswith(prefix) and file.is_file():
            yield file


def _secret(file: FilePath) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(_LARGEST_SECRET + 1)
        if len(content) <= _LARGEST_SECRET:
            return content.decode().rstrip("\r\n")
        reason = "holds more than 1 MiB"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        reason = "is no UTF-8 text"
    raise SettingsError(str(file.parent), [said(file.name, reason)])


def _keys_at(table: object, path: list[str]) -> list[str]:
    for part in path:
        table = table.get(part) if isinstance(table, Mapping) else None
    return list(table) if isinstance(table, Mapping) else []


def _decoded(text: str, shape: Shape | None) -> Any:
    """`text`, or the list or table it means; what cannot be decoded stays text, and the model says so."""
    if shape is None or not (shape.is_list or shape.is_table):
        return text
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.loads(text, object_pairs_hook=_with_names_once)
        except (ValueError, RecursionError):
            return text
    return [part.strip() for part in text.split(",")] if shape.is_list else text


def _with_names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As TOML has it: a setting given twice is a mistake, not the last one."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice")
    return table


def _put(tables: dict[str, Any], path: Path, value: Any) -> None:
    *parents, last = path
    for parent in parents:
        inner = tables.setdefault(parent, {})
        if not isinstance(inner, dict):
            return  # the parent itself was given as something else, which the model refuses
        tables = inner
    tables[last] = value

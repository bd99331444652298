"""Settings from environment variables, and from files in a folder of secrets.

`INTEGR8S_IDEM_STORE__PASSWORD` sets `store.password`; two underscores separate names, which are
case-insensitive.  Underscores also match hyphens in names of services:
`INTEGR8S_IDEM_SERVICES__K8S_WORKER__CONCURRENCY` sets `services.k8s-worker.concurrency`.
Lists are comma-separated or JSON, whole tables are JSON.  Empty values are ignored.

The sources of pydantic-settings ignore unknown sections and stop at the first list
that is not JSON; here every name reaches the model, which rejects unknown names.
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
from integr8s_idem.config.message_text import printable_mistake
from integr8s_idem.config.schema_shape import Path, Shape, shape_of
from integr8s_idem.errors import SettingsError

SECRETS_DIR: Final = "SECRETS_DIR"
"""Name of the variable with the folder of secrets, without the prefix."""
SPEEDUPS: Final = "SPEEDUPS"
"""Name of the variable that disables native code, without the prefix; `_util/speedups.py` reads it at import."""
_OTHER: Final = frozenset({SECRETS_DIR, SPEEDUPS})
_DELIMITER: Final = "__"
_KUBERNETES_LINK: Final = re.compile(r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP).*)?)")
"""Variables that Kubernetes sets in every pod for a Service whose name starts like the prefix."""
_LARGEST_SECRET: Final = 1024 * 1024


def same_name(name: str) -> str:
    """Normalize a name so that case, hyphens and underscores do not matter."""
    return name.lower().replace("-", "_")


def variable_name(prefix: str, path: Path) -> str:
    """Return the variable that sets `path`."""
    return prefix + _DELIMITER.join(path).upper().replace("-", "_")


def environment_values(settings_type: type[BaseSettings]) -> dict[str, str]:
    """Return the environment variables that are settings."""
    prefix = _prefix_of(settings_type)
    sections = {same_name(name) for name in settings_type.model_fields}
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper().startswith(prefix) and value and _is_setting(name.upper()[len(prefix) :], sections)
    }


def secret_values(settings_type: type[BaseSettings]) -> dict[str, str]:
    """Return the files in the folder of secrets that are settings, without trailing newlines.

    Raises:
        SettingsError: The folder or a file in it cannot be read.
    """
    prefix = _prefix_of(settings_type)
    folder = os.environ.get(prefix + SECRETS_DIR)
    if not folder:
        return {}
    return {file.name: _secret(file) for file in _secret_files(FilePath(folder), prefix)}


class NamedValues(PydanticBaseSettingsSource):
    """Converts named values into nested tables; only lists and tables are decoded, the model converts the rest."""

    def __init__(self, settings_cls: type[BaseSettings], texts: Mapping[str, str]) -> None:
        super().__init__(settings_cls)
        self._texts = texts
        self._prefix = _prefix_of(settings_cls)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Required by the base class; `__call__` does not use it."""
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        reading = current_reading()
        existing = [self.current_state, *([reading.table] if reading else [])]
        tables: dict[str, Any] = {}
        # Shorter names first, so that single settings override a table given as JSON.
        for name, text in sorted(self._texts.items(), key=lambda item: (len(item[0]), item[0])):
            path, shape = self._place(name, existing)
            _put(tables, path, _decoded(text, shape))
            if reading is not None:
                reading.origins[path] = name
        return tables

    def _place(self, name: str, existing: list[Mapping[str, Any]]) -> tuple[Path, Shape | None]:
        """Return the path for `name`, spelled as in the model or the file."""
        shape: Shape | None = shape_of(self.settings_cls)
        path: list[str] = []
        for part in name[len(self._prefix) :].split(_DELIMITER):
            known = shape.names() if shape else []
            if shape and shape.names_are_free:
                known = [key for table in existing for key in _keys_at(table, path)]
            spelled = next((key for key in known if same_name(key) == same_name(part)), part.lower())
            shape = shape.child(spelled) if shape else None
            path.append(spelled)
        return tuple(path), shape


def _prefix_of(settings_type: type[BaseSettings]) -> str:
    return settings_type.model_config.get("env_prefix", "").upper()


def _is_setting(name: str, sections: set[str]) -> bool:
    """Return whether a variable with the prefix is a setting, valid or not."""
    if same_name(name.partition(_DELIMITER)[0]) in sections:
        return True
    return name not in _OTHER and not name.startswith("TEST_") and not _KUBERNETES_LINK.fullmatch(name)


def _secret_files(folder: FilePath, prefix: str) -> Iterator[FilePath]:
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise SettingsError(
            prefix + SECRETS_DIR,
            [printable_mistake(str(folder), f"cannot be read: {error.strerror}; set a folder, or unset the variable")],
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
        reason = "is larger than 1 MiB"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        reason = "is not valid UTF-8"
    raise SettingsError(str(file.parent), [printable_mistake(file.name, reason)])


def _keys_at(table: object, path: list[str]) -> list[str]:
    for part in path:
        table = table.get(part) if isinstance(table, Mapping) else None
    return list(table) if isinstance(table, Mapping) else []


def _decoded(text: str, shape: Shape | None) -> Any:
    """Decode a list or table; text that cannot be decoded is returned unchanged, for the model to reject."""
    if shape is None or not (shape.is_list or shape.is_table):
        return text
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.loads(text, object_pairs_hook=_reject_duplicate_names)
        except (ValueError, RecursionError):
            return text
    return [part.strip() for part in text.split(",")] if shape.is_list else text


def _reject_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a table, and reject duplicate names as TOML does."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("duplicate name")
    return table


def _put(tables: dict[str, Any], path: Path, value: Any) -> None:
    *parents, last = path
    for parent in parents:
        inner = tables.setdefault(parent, {})
        if not isinstance(inner, dict):
            return  # the parent is not a table, which the model rejects
        tables = inner
    tables[last] = value

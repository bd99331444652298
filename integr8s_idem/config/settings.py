"""`Settings`, read from arguments, the environment, secret files and settings.toml."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import Field, StringConstraints, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from integr8s_idem.config.environment import NamedValues, environment_values, same_name, secret_values
from integr8s_idem.config.idempotency import IdempotencyConfig
from integr8s_idem.config.load_context import current_reading, instead, without
from integr8s_idem.config.sections import KafkaSettings, ReplaySettings, ServiceSettings, TelemetrySettings
from integr8s_idem.config.store_sections import RedisStoreSettings, StoreSettings

ServiceKey: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,100}$")]


class Settings(BaseSettings):
    """The settings of a process.  `load_settings` reads them once at startup.

    Sources, in order of precedence for each setting: arguments, `INTEGR8S_IDEM_*` environment variables,
    the folder in `INTEGR8S_IDEM_SECRETS_DIR`, the file that `load_settings` reads.  If you create an
    instance directly, no file is read and `check_settings` is not called.

    Applications add their own sections in a subclass:

        class ShopSettings(Settings):
            shop: ShopSection = ShopSection()
    """

    model_config = SettingsConfigDict(
        env_prefix="INTEGR8S_IDEM_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    kafka: KafkaSettings = KafkaSettings()
    store: StoreSettings = RedisStoreSettings()
    idempotency: IdempotencyConfig = IdempotencyConfig()
    services: dict[ServiceKey, ServiceSettings] = Field(default_factory=dict)
    replay: ReplaySettings = ReplaySettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    def service(self, name: str) -> ServiceSettings:
        """Return the settings of the service `name`, or the defaults.

        Names from the environment have underscores instead of hyphens; both forms are found.
        """
        if name in self.services:
            return self.services[name]
        alike = (section for key, section in self.services.items() if same_name(key) == same_name(name))
        return next(alike, ServiceSettings())

    def idempotency_for(self, name: str) -> IdempotencyConfig:
        """Return `[idempotency]` with the overrides of the service `name`."""
        section = self.service(name)
        own = {
            field: getattr(section, field)
            for field in ("max_attempts", "on_in_progress", "on_failure", "on_store_error")
        }
        return self.idempotency.model_copy(update={field: value for field, value in own.items() if value is not None})

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in order of precedence."""
        reading = current_reading()
        return (
            init_settings,
            NamedValues(settings_cls, environment_values(settings_cls)),
            NamedValues(settings_cls, secret_values(settings_cls)),
            InitSettingsSource(settings_cls, init_kwargs=dict(reading.table) if reading else {}),
        )

    @model_validator(mode="before")
    @classmethod
    def _merge(cls, tables: Any) -> Any:
        """Record the merged sources in the current reading, and apply its corrections."""
        reading = current_reading()
        if reading is None or not isinstance(tables, dict):
            return tables
        reading.merged = tables
        return instead(without(tables, reading.without), reading.instead)

"""Settings of services that sign their replays, and of services that trust every producer."""

from __future__ import annotations

from typing import Final

from pydantic import SecretStr

from integr8s_idem import Settings
from integr8s_idem.config import ReplaySettings

SECRET: Final = "0123456789abcdef" * 4
OTHER_SECRET: Final = "fedcba9876543210" * 4


def signed_by(*secrets: str) -> Settings:
    """Return settings with these secrets."""
    return Settings(replay=ReplaySettings(secret=tuple(map(SecretStr, secrets))))


SIGNED: Final = signed_by(SECRET)
TRUSTED: Final = ReplaySettings(unsigned="trust")

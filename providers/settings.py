"""The settings of the platform: the library's, and a section of its own."""

from __future__ import annotations

from integr8s_idem import Settings
from services.settings import PlatformSection


class PlatformSettings(Settings):
    """What settings.toml holds for the platform: `[platform]` beside the library's sections."""

    platform: PlatformSection = PlatformSection()

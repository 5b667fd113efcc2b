"""The settings of the walk forward: ``DTRAIN_WALK_FORWARD_*`` environment variables. None of them is a secret."""

from __future__ import annotations

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from dtrain_dagster.settings.environment import EnvironmentSettings

PREFIX = "DTRAIN_WALK_FORWARD_"
BUNDLED, BUNDLED_LAST = "sp500_panel", 2022
"""The bundled prices, and the last year that they have."""


class WalkForwardSettings(EnvironmentSettings):
    """The test years, and where their launchpads begin. Every field is the environment variable of that name in
    capitals after ``DTRAIN_WALK_FORWARD_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    first_year: int = Field(default=2000, ge=1801, le=2199, description="The first test year")
    last_year: int | None = Field(
        default=None,
        ge=1801,
        le=2199,
        description="The last test year; unset: 2022 for the bundled prices, else the present year",
    )
    valid_years: int = Field(
        default=2, ge=1, description="Years before the test year in which the epoch is chosen; the training ends before"
    )
    warm_start: bool = Field(
        default=False, description="Begin each year with the weights of the year before, which must be there"
    )
    cron: str = Field(
        default="0 5 2 * *",
        pattern=r"^\s*(\S+\s+){4}\S+\s*$",
        description="Schedule of the newest year, once it is switched on, in the time zone of DTRAIN_RETRAIN_TIMEZONE",
    )

    @model_validator(mode="after")
    def _years_in_order(self) -> WalkForwardSettings:
        if self.last_year is not None and self.last_year < self.first_year:
            raise ValueError(
                f"{PREFIX}FIRST_YEAR={self.first_year} comes after {PREFIX}LAST_YEAR={self.last_year}: that leaves "
                "no year"
            )
        return self

    def last_year_of(self, prices: str) -> int | None:
        """Return the last test year of these prices; None for the present year, whichever that is."""
        if self.last_year is None and prices == BUNDLED:
            return max(BUNDLED_LAST, self.first_year)
        return self.last_year


def read_walk_forward() -> WalkForwardSettings:
    """Return the settings. Raise `dtrain_dagster.settings.environment.SettingsError` for values that cannot be used."""
    return WalkForwardSettings.read()

"""The way from a finished job to a registered model that a real scoring server answers for.

`Registry.register_model` → `check_serving` → `judge_champion` → `choose_alias` → `promote`. Nothing here knows Dagster;
the tracking server and the registry are addresses.
"""

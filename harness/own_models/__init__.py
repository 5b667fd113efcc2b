"""Models and losses as users have them, in modules outside of all packages: jobs name them as ``paced:tcn``, and
processes find them by this folder in PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

OWN_MODELS = Path(__file__).parent

"""Attacks on this project, each with a seed: what they tried, and whether anything gave way."""

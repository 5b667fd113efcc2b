"""Tapes of faults (`tape`), played (`play`) on nodes (`hosts`) and links (`network`), and what must hold afterwards
(`properties`)."""

"""How figures are written for people: in Dagster, in the terminal and on pages alike."""


def dollars(usd: float) -> str:
    """``$0.0042``, ``$1.23``, ``$1,234``: enough digits to be a figure, not more."""
    if abs(usd) >= 1000:
        return f"${usd:,.0f}"
    return f"${usd:.2f}" if abs(usd) >= 1 else f"${usd:.4f}"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"

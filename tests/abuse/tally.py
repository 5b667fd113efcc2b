"""The counts of a campaign of attacks; the attacks are in the modules beside this one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts of one campaign. All but ``tried`` must be 0."""

    tried: int = 0
    """Attacks that were carried out."""
    accepted: int = 0
    """Attacks whose request, connection, file or value was accepted."""
    outages: int = 0
    """Attacks after which something else, which was not attacked, no longer worked."""
    executed: int = 0
    """Attacks whose own code ran, or that made something else be imported or called."""
    leaked: int = 0
    """Secrets that were found in wrong places."""
    findings: list[str] = field(default_factory=list)
    """One sentence for each attack that succeeded: what was done, and the effect."""

    @property
    def is_clean(self) -> bool:
        """True if something was tried and no attack succeeded."""
        return self.tried > 0 and not (self.accepted or self.outages or self.executed or self.leaked)

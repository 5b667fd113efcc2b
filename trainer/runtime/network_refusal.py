"""Which refusals of Azure come from a network rule. They have the status of a missing role (403, sometimes 401 or 502),
and people who are told of a role then look for one that they already have."""

from __future__ import annotations

import re

NETWORK_REMEDY = (
    "this is a network restriction, not a missing role: access is not allowed from this machine's network. Continue "
    "from inside the virtual "
    "network (the subnet `orchestrator` of deploy/azure), or through a VPN or Bastion, and make sure that its DNS "
    "returns the private address (`nslookup <host>`)"
)
"""What to do about a refusal by a network rule."""
_CODES = {
    "authorizationfailure",  # storage (azure-cli 11345); a missing role is AuthorizationPermissionMismatch
    "forbiddenbyconnection",  # key vault, public access disabled
    "forbiddenbyfirewall",  # key vault, the address is not among its rules
    "publicnetworkaccessdisabled",
}
_WORDS = re.compile(
    r"(?i)public network access (is|has been) (disabled|denied)|publicnetworkaccess(disabled| is set to)|"
    r"forbiddenby(connection|firewall)|not authorized from this network|"
    r"private[ -]?(link|endpoint)|"  # MicrosoftDocs/azure-docs issue 90426
    r"client address is not authorized|client with ip .* is not allowed|network security perimeter|aka\.ms/acr/firewall"
)
_NO_NETWORK_RULE = re.compile(r"(?i)does not have authorization to perform action|failed to authenticate the request")
"""A missing role, whose operation may itself be one on private endpoints; a wrong key (Azurite gives it the code of a
network rule)."""


def is_network_refusal(code: str, message: str) -> bool:
    """Return whether a refusal with this code and these words comes from a network rule, and not from a missing role.
    Pure."""
    if _NO_NETWORK_RULE.search(message):
        return False
    return code.casefold() in _CODES or bool(_WORDS.search(message))

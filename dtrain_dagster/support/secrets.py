"""Secrets by reference for the orchestrator: the functions of `trainer.secrets.resolve`, which nodes need as well."""

from trainer.secrets.addresses import refuse_secret, secret_in
from trainer.secrets.redaction import STRUCK, redact, remember
from trainer.secrets.references import IDENTITY, SecretError, check_reference, check_token, is_reference
from trainer.secrets.resolve import VAULT_SUFFIX_VARIABLE, resolve

__all__ = [
    "IDENTITY",
    "STRUCK",
    "VAULT_SUFFIX_VARIABLE",
    "SecretError",
    "check_reference",
    "check_token",
    "is_reference",
    "redact",
    "refuse_secret",
    "remember",
    "resolve",
    "secret_in",
]

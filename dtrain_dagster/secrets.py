"""Secrets by reference, as the orchestrator uses them: the functions of `trainer.secrets`, which nodes need as well."""

from trainer.addresses import refuse_secret, secret_in
from trainer.redaction import STRUCK, redact, remember
from trainer.secret_references import IDENTITY, SecretError, check_reference, check_token, is_reference
from trainer.secrets import VAULT_SUFFIX_VARIABLE, resolve

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

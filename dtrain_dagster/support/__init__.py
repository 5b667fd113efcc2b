"""Tools that any package may use and that know none of them: secrets, the audit log, notices, locks, words for
people."""

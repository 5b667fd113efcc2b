"""What any folder may use and what knows none of them: secrets, the audit log, notices, locks, words for people."""

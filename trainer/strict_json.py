"""The old place of `trainer.documents.strict_json.Document`: values that Dagster stored before the move name it.

Nothing of this version imports it, and nothing else belongs here.
"""

from trainer.documents.strict_json import Document as Document

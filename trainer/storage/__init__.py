"""The few verbs that everything on disk or in Blob goes through, opened by `trainer.storage.open.open_storage`.

What lies under which name does not belong here, see `trainer.rundir`.
"""

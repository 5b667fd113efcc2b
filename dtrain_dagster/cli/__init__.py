"""The command `dtrain`: options, tables and exit codes. A command imports what it needs when it is called.

Whatever an asset or a sensor needs as well does not belong here.
"""

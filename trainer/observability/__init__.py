"""The reports and measurements of a rank: events and their sinks, communication, the node, traces, and the watchdog.

Later uses of these figures, such as alerts and advice, do not belong here: the orchestrator reads the events.
"""

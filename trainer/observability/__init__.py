"""What a rank reports and measures: events and their sinks, communication, the node, traces, and the watchdog.

What is made of these figures later, alerts and advice, does not belong here: the orchestrator reads the events.
"""

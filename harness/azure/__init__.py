"""Azure on this machine: an Azure ML workspace (`emulator`), storage (`azurite`), and a bad network before it
(`blob_proxy`). `resolver` makes hosts below ``localhost`` this machine."""

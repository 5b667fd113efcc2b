"""Real, small engines on this machine, and a training on any of them (`engine_training`). `process_engine` is one of
plain processes."""

"""Elastic membership: which members are alive, which are in the next generation, and the world of a generation.

A lost node takes this way: `failure_detector`, in the process that `peer_watch` starts, sees that it is gone;
`dynamic_rendezvous` fails the group (`trainer.comm.group`), so the step is discarded; `trainer.engine.trainer` hands
over to `trainer.engine.joining`, which asks `dynamic_rendezvous` for the next world; `membership` agrees on it by the
rules in `generation` and the files of `generation_record`; `trainer.engine.workload` enters it, and the step is done
again.

The collectives of a world belong in `trainer.comm`. What a training does with a new world, such as taking over a state,
belongs in `trainer.engine`.
"""

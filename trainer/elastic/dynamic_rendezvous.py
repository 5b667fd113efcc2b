"""Elastic rendezvous of this process: its peers, its current generation, and the world of that generation."""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from trainer.comm.encryption import (
    choose_certificates,
    describe_open_traffic,
    is_mesh_encrypted,
    open_contexts,
    refuse_open_traffic,
    refuse_own_connections,
    uses_nccl,
    warn_of_open_traffic,
)
from trainer.comm.group import GroupError, InterruptibleGroup
from trainer.comm.launch_secret import LaunchSecret, read_launch_secret, warn_if_unauthenticated
from trainer.comm.launcher_env import RankFacts
from trainer.comm.own_address import own_address
from trainer.comm.parameter_server import ParameterServerGroup
from trainer.comm.rendezvous_store import AuthenticatedStore
from trainer.comm.socket_group import MeshGroup, connect_mesh
from trainer.comm.static_rendezvous import open_listener
from trainer.comm.tls import TLSContexts
from trainer.comm.torch_transport import Transport, make_torch_transport
from trainer.comm.world import World, explain_shared_gpu, gpu_name
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.elastic.generation import TOLD, Candidate, Generation
from trainer.elastic.membership import Membership
from trainer.elastic.peer_watch import PeerWatch
from trainer.rundir import RunDir
from trainer.runtime.launch import Launch

OVER = "others have begun a generation without this process"
_log = logging.getLogger(__name__)


class DynamicRendezvous:
    """A rendezvous that keeps this process's `World` current. One thread uses it; the peers'
    thread calls a generation off when a member is lost."""

    def __init__(
        self,
        rundir: RunDir,
        config: DistributedTrainingConfig,
        facts: RankFacts,
        device: torch.device,
        environment: Mapping[str, str],
        job: str,
    ) -> None:
        self.config, self.facts, self.device, self.job = config, facts, device, job
        self.secret = read_launch_secret(environment)
        self.launch = Launch.read(environment).number
        self.member = f"n{facts.node_rank}p{facts.local_rank}-{uuid.uuid4().hex[:8]}"
        self.host = own_address(environment, facts.master_addr)
        self._gpu_name = gpu_name(device)
        self.generation: Generation | None = None
        self.world: World | None = None
        self.has_state_of = 0
        """The newest generation whose state this process has; set once it has taken it over."""
        self.newcomers: tuple[str, ...] = ()
        self._is_over = self._has_warned = self._others_may_leave = False
        self._formed_at = time.monotonic()
        self._fallbacks = 0
        self.tls = open_contexts(config, self.secret, self.host, job)
        self._certificates = choose_certificates(config, self.secret, self.host)
        self.peers = PeerWatch(self.member, self.secret, job, self.host, self._certificates, config, self._changed)
        self.membership = Membership(
            rundir.storage,
            self.peers,
            self.launch,
            facts.world_size,
            config.micro_batches,
            config.communication_retries,
            config.peer_timeout_seconds,
            config.solo_timeout_seconds,
            first=rundir.last_generation() + 1,
        )
        self._closed = threading.Event()
        threading.Thread(target=self._look_around, name="newcomers", daemon=True).start()

    def announce(self) -> None:
        """Announce that this process is coming, before it has its data and its model."""
        self.membership.announce(self._candidate())

    def next_world(self, ended: Callable[[], None], **what: Any) -> World:
        """Join the next generation, with the state that ``what`` describes (`trainer.elastic.generation.Candidate`),
        and return its world. The group may not be formed yet: the first collective waits for it."""
        old = self.generation
        if old is not None:
            told = {"reason": what.get("reason", ""), "communication": what.get("communication", False)}
            self.peers.broadcast({"regroup": old.number, **told})
        if self.world is not None:
            self.world.close()
            self.world = None
        listener = open_listener(self.host)
        try:
            mine = self._candidate(
                store_port=listener.getsockname()[1],
                ready=True,
                was_in=self.has_state_of,
                rank=old.rank_of(self.member) if old else self.facts.rank,
                **what,
            )
            generation = self.membership.agree_on_next(mine, old.number if old else 0, ended)
        except BaseException:
            listener.close()
            raise
        self.membership.enter(generation)
        self._fallbacks = self._fallbacks + 1 if generation.topology == "star" else 0
        self._formed_at, self.newcomers, self._is_over = time.monotonic(), (), False
        self._others_may_leave = False
        self.generation = generation
        self.world = form_world(
            generation, self.member, self.facts, self.device, listener, self.config, self.job, self.secret,
            self.tls,
        )  # fmt: skip
        if old is None:
            warn_if_unauthenticated(self.secret, self.world.rank)
        if self.world.open_traffic and not self._has_warned:
            self._has_warned = True
            warn_of_open_traffic(self.world.rank, self.world.open_traffic)
        self._changed()  # a member may have been lost meanwhile
        return self.world

    @property
    def recovery_reason(self) -> str:
        """Return why a new generation should begin after this step, "" if none should."""
        if self._is_over:
            return OVER
        if self.newcomers:
            return f"{', '.join(self.newcomers)} came"
        return ""

    def is_all_reduce_due(self, cut_off: int) -> bool:
        """Return whether, in parameter-server mode, to try all-reduce again. ``cut_off``: ranks that miss a peer."""
        if self.generation is None or self.generation.topology != "star" or cut_off:
            return False
        wait = self.config.allreduce_retry_seconds * 2 ** min(self._fallbacks - 1, 6)
        return time.monotonic() - self._formed_at > wait

    @property
    def is_cut_off(self) -> bool:
        """Whether this process cannot reach a member of the generation."""
        if self.generation is None:
            return False
        view = self.peers.statuses()
        return any(view.get(seat.member, "here") != "here" for seat in self.generation.members)

    def require_current(self) -> None:
        """Raise `GroupError` if others have formed a newer generation without this process: its work does not count."""
        if self.generation is not None and self.membership.is_over(self.generation):
            raise GroupError(OVER, communication=False)

    def let_others_leave(self, may: bool = True) -> None:
        """From now on, take the end of another member for what it is: it has nothing more to do. With ``may`` False it
        is a loss again, also of those that have ended meanwhile."""
        self._others_may_leave = may
        self._changed()

    def describe_peers(self) -> dict[str, str]:
        """Return this process's view of the other members, for the record of a failure."""
        heard = self.peers.seconds_since_heard()
        return {
            member: f"{view}, heard {heard.get(member, 0):.1f} s ago" for member, view in self.peers.statuses().items()
        }

    def close(self) -> None:
        """Take no further part: peers see this process as gone."""
        self._closed.set()
        self.peers.close()
        if self.world is not None:
            self.world.close()

    def _candidate(self, **what: Any) -> Candidate:
        host, port = self.peers.address
        return Candidate(
            member=self.member, node=self.facts.node_rank, local_rank=self.facts.local_rank, launch=self.launch,
            host=host, port=port, gpu=self.device.type == "cuda", gpu_name=self._gpu_name,
            certificates=self._certificates, **what,
        )  # fmt: skip

    def _changed(self) -> None:
        """Check, after a change of view or a message, whether the present group can still be used."""
        generation, world = self.generation, self.world
        messages = self.peers.take_messages()
        if generation is None or world is None or world.group is None or self._others_may_leave:
            return
        view = self.peers.statuses()
        rank = generation.rank_of(self.member)
        needed = generation.members[:1] if generation.topology == "star" and rank else generation.members
        for seat in needed:
            if seat.member != self.member and view.get(seat.member) in ("gone", "silent"):
                return world.group.fail(f"{seat.member} is {view[seat.member]}")
        for message in messages:
            if message.get("regroup") == generation.number:
                reason = _told_by(message["from"], str(message.get("reason") or ""))
                return world.group.fail(reason, bool(message.get("communication")))

    def _look_around(self) -> None:
        """Check now and then whether this generation is still the newest, a member asks for another, or a newcomer
        waits. Members that are cut off from each other meet in the storage only."""
        while not self._closed.wait(self.membership.look_seconds):
            generation, world = self.generation, self.world
            if generation is None or world is None:
                continue
            try:
                over, asking = self.membership.is_over(generation), self.membership.find_requests(generation)
                found = self.membership.find_newcomers(generation) if world.rank == 0 else []
            except OSError as error:
                _log.warning("could not look for other members: %s", error)
                continue
            if self.generation is not generation or self.world is not world:
                continue
            if len(generation.members) < self.config.micro_batches:
                self.newcomers = tuple(f"node {item.node} ({item.member})" for item in found)
            self._is_over = over
            if world.group is not None and over:
                world.group.fail(OVER, communication=False)
            elif world.group is not None and asking:
                world.group.fail(_told_by(asking[0].member, asking[0].reason), asking[0].communication)


def _told_by(member: str, reason: str) -> str:
    reason = reason or "asks for a new generation"
    return reason if reason.startswith(TOLD) else f"{TOLD} {member}: {reason}"


def form_world(
    generation: Generation,
    member: str,
    facts: RankFacts,
    device: torch.device,
    listener: socket.socket,
    config: DistributedTrainingConfig,
    job: str,
    secret: LaunchSecret,
    tls: TLSContexts | None = None,
) -> World:
    """Return at once the world of a generation for one of its members; the first collective waits for all.

    ``listener``: the socket at this member's ``store_port``, closed if this member does not need it. ``job``: the job's
    id; keys from the ``secret`` are derived for it and the generation. ``tls``: what this process's connections are
    encrypted with. Raise `ConfigError` if encryption is required and something would leave a host without it, and if
    two members have the same GPU.
    """
    rank = generation.rank_of(member)
    assert rank is not None
    size, first = len(generation.members), generation.members[0]
    by_nccl = uses_nccl(config, generation.gpu)
    backend = "nccl" if by_nccl else "gloo"
    group = None
    source, hosts = generation.members[rank].certificates, len({seat.host for seat in generation.members})
    open_traffic = describe_open_traffic(source, hosts, by_nccl, config.encryption == "off")
    topology = generation.topology
    is_mesh = topology == "mesh" and is_mesh_encrypted(source, hosts, by_nccl)
    # By their places: a node's new incarnation has the GPU of the one before, which may still be a member.
    gpus = {f"local rank {seat.local_rank} of node {seat.node}": seat.gpu_name for seat in generation.members}
    try:
        if why := explain_shared_gpu(gpus):
            raise ConfigError(why)
        refuse_open_traffic(config, open_traffic)
        if is_mesh and size > 1:
            refuse_own_connections(config)
    except ConfigError:
        listener.close()
        raise
    if size == 1 or (rank and not is_mesh):
        listener.close()
    if size > 1:
        address = (first.host, first.store_port)
        name, about = f"{job}/g{generation.number}", (job, generation.number)

        def open_transport() -> Transport:
            seconds = config.collective_timeout_seconds
            if topology == "star":
                key = secret.key("star", *about)
                if rank == 0:
                    return ParameterServerGroup.serve(listener, size, key, seconds, tls)
                return ParameterServerGroup.connect_worker(address, rank, size, key, seconds, tls)
            if is_mesh:
                places = [(seat.host, seat.store_port) for seat in generation.members]
                channels = connect_mesh(places, rank, listener, secret.key("mesh", *about), seconds, tls)
                return MeshGroup(rank, channels, seconds)
            key = secret.key("store", *about)
            store = AuthenticatedStore(address, rank, size, key, seconds, listener if rank == 0 else None, tls)
            gpu = device if backend == "nccl" else None
            return make_torch_transport(
                dist.PrefixStore(name, store),
                rank,
                size,
                gpu,
                config.collective_timeout_seconds,
                config.solo_timeout_seconds,
                generation.members[rank].host,
                key=secret.key("world", *about),
                close_store=store.close,
            )

        group = InterruptibleGroup(rank, size, open_transport, device if device.type == "cuda" else None)
    return World(facts, device, backend, generation.number, group, topology, config.solo_timeout_seconds, open_traffic)

"""What the ranks of a launch tell each other before, or beside, a framework's program: small texts, through rank 0.

It listens at MASTER_ADDR:MASTER_PORT for as long as the meeting lasts, and admits ranks that prove to know the launch's
secret (`trainer.comm.handshake`). Needs no torch. What is told is no business of this module.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import time
from collections.abc import Mapping
from types import TracebackType

from trainer.comm.channel import Channel, Flow, PeerError, connect, run_flows
from trainer.comm.handshake import AuthenticationError
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.launcher_env import RankFacts
from trainer.comm.listener import BACKLOG, Door, admit_ranks, check_rank
from trainer.comm.own_address import own_address
from trainer.errors import ConfigError

MEET_SECONDS = 1800.0
"""The seconds that ranks wait for each other: nodes of one launch may come at different times."""
NAME = "meeting"
_SAID = b"said"
LOOK_SECONDS = 3600.0


class MeetingError(ConnectionError):
    """The ranks did not find each other, or lost each other. The message names the address and the ranks."""


class Meeting:
    """One rank's part in a meeting of all ranks; a context manager, which ends it for this rank."""

    def __init__(
        self, facts: RankFacts, secret: LaunchSecret, environment: Mapping[str, str], seconds: float = MEET_SECONDS
    ) -> None:
        """Meet the others. Raise `MeetingError` if they are not all there within that time, `ConfigError` where rank 0
        cannot listen at its address."""
        self.facts, self._seconds = facts, seconds
        self._key = secret.key("frameworks", facts.world_size)
        self._links: dict[int, Channel] = {}
        if facts.world_size == 1:
            return
        try:
            if facts.rank == 0:
                self._admit(environment)
            else:
                self._links[0] = self._join()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it for this rank."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def gather(self, said: str) -> list[str]:
        """Return what each rank has said, in the order of ranks; all ranks call it. Raise `MeetingError` where one of
        them has ended."""
        if self.facts.rank:
            self._run({0: self._links[0].send(_SAID, said.encode())}, self._seconds)
            return list(json.loads(self._hear(self._seconds)))
        heard = {0: said}

        def listen(rank: int, link: Channel) -> Flow:
            heard[rank] = (yield from link.receive(_SAID)).decode()

        self._run({rank: listen(rank, link) for rank, link in self._links.items()}, self._seconds)
        answer = [heard[rank] for rank in range(self.facts.world_size)]
        self.tell(json.dumps(answer))
        return answer

    def tell(self, said: str) -> None:
        """Say something to all others, as rank 0; those that have ended are passed over."""
        for rank, link in self._links.items():
            with contextlib.suppress(MeetingError):
                self._run({rank: link.send(_SAID, said.encode())}, self._seconds)

    def hear(self) -> str:
        """Wait, as another rank, for what rank 0 says next, however long that takes. Raise `MeetingError` where it has
        ended."""
        poll = select.poll()  # select takes no descriptor above 1,023
        poll.register(self._links[0].connection, select.POLLIN)
        while not poll.poll(1000 * LOOK_SECONDS):
            pass
        return self._hear(self._seconds)

    def wait_for_end(self, seconds: float) -> None:
        """Wait, as another rank, until rank 0 has left, at most this long."""
        with contextlib.suppress(MeetingError):
            self._hear(seconds)

    # ---

    def _hear(self, seconds: float) -> str:
        heard = list[str]()

        def listen() -> Flow:
            heard.append((yield from self._links[0].receive(_SAID)).decode())

        self._run({0: listen()}, seconds)
        return heard[0]

    def _run(self, flows: Mapping[int, Flow], seconds: float) -> None:
        try:
            run_flows([(self._links[rank], flow) for rank, flow in flows.items()], 0.0, time.monotonic() + seconds)
        except PeerError as error:
            raise MeetingError(f"rank {error.rank} has left, or does not answer: {error}") from error

    def _admit(self, environment: Mapping[str, str]) -> None:
        size, address = self.facts.world_size, bind_address(self.facts, environment)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, self.facts.master_port or 0), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot listen at {address}:{self.facts.master_port} ({error.strerror}): set DTRAIN_HOST "
                "to the address of its node, or choose another --master-port"
            ) from error
        with listener:
            door: Door[int] = Door(listener, self._key, NAME, lambda name: check_rank(name, size, self._links))
            try:
                admit_ranks(door, self._links, size - 1, time.monotonic() + self._seconds)
            except TimeoutError:
                missing = sorted(set(range(1, size)) - set(self._links))
                turned_away = f"; {door.refused[-1]}" if door.refused else ""
                raise MeetingError(
                    f"ranks {missing} did not connect to {address}:{self.facts.master_port} within "
                    f"{self._seconds:.0f} s{turned_away}"
                ) from None

    def _join(self) -> Channel:
        address = (self.facts.master_addr, self.facts.master_port or 0)
        try:
            return connect(address, self._key, str(self.facts.rank), NAME, None, time.monotonic() + self._seconds)
        except AuthenticationError as error:
            raise MeetingError(f"the process at {address[0]}:{address[1]} is not rank 0: {error}") from error
        except OSError as error:
            raise MeetingError(f"rank 0 is not at {address[0]}:{address[1]}: {error}") from error


def bind_address(facts: RankFacts, environment: Mapping[str, str]) -> str:
    """Return the address at which rank 0 listens: the one that the others are told where it is a number, since a name
    may mean loopback on its own host."""
    try:
        ipaddress.ip_address(facts.master_addr)
    except ValueError:
        return own_address(environment)
    return facts.master_addr

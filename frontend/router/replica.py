"""A connection to the engine of one replica."""

from __future__ import annotations

import pickle
from typing import Any

from coppice.runtime.process.channel import Channel
from coppice.runtime.process.messages import Ready
from coppice.runtime.process.sockets import MessageSocket, connect
from coppice.runtime.report.snapshot import EngineStats

_CONNECT_SECONDS = 10.0


class Replica:
    """One replica, as the hub sees it.

    Attributes:
        name: of the replica, unlike that of any other.
        ready: what its engine has said of itself.
        number: its place in the router.
        draining: whether it gets no new requests.
        flights: the names of the requests that it has.
        stats: its counts, as they were told last.
        late: whether it has not answered a call in time, and no other one since.
    """

    def __init__(self, name: str, connection: MessageSocket, ready: Ready) -> None:
        self.name, self.ready = name, ready
        self.number = -1
        self.draining = False
        self.flights: set[str] = set()
        self.stats: EngineStats | None = None
        self.late = False
        self._connection = connection
        self._channel = Channel(connection)

    @classmethod
    def connected(cls, name: str, address: tuple[str, int], key: bytes) -> Replica:
        """Connects to an engine, and waits until it has said what it is. Raises OSError."""
        connection = connect(address, key, _CONNECT_SECONDS)
        try:
            if not connection.poll(_CONNECT_SECONDS):
                raise TimeoutError(f"replica {name} did not answer in {_CONNECT_SECONDS:.0f} s")
            (ready,) = pickle.loads(connection.recv_bytes())
        except EOFError as error:
            connection.close()
            raise ConnectionResetError(f"replica {name}: {error}") from error
        except BaseException:
            connection.close()
            raise
        return cls(name, connection, ready)

    def fileno(self) -> int:
        """To wait for what it sends."""
        return self._connection.fileno()

    def send(self, item: Any) -> None:
        """Sends a message, soon; from any thread."""
        self._channel.send(item)

    def come(self) -> list[Any]:
        """What has come, without waiting. Raises EOFError or OSError at its end."""
        return [item for message in self._connection.come() for item in pickle.loads(message)]

    def cut(self) -> None:
        """Ends the connection; what is not sent yet is lost."""
        self._channel.cut()

    def close(self) -> None:
        """Frees it; waits for what is sent at present, unless it was cut."""
        self._channel.close()

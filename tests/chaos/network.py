"""A network of one's own for the members of a cell: a namespace for each, joined by a bridge, so that it can be cut.

Ports of the bridge that are isolated do not reach one another, while the routers, which run on the machine itself, reach
everyone: exactly what a broken path between the pools looks like. A cut drops packets, it refuses nothing.
"""

import ipaddress
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

#: For one call of ip or bridge, in seconds.
CALL_S = 10.0
#: For the first connection over the bridge, in seconds.
REACH_S = 3.0
#: Of 198.18.0.0/15, which is set aside for tests of networks: nothing else on a machine uses it.
_NETS = ipaddress.ip_network("198.18.0.0/15")


class NoNetwork(Exception):
    """Namespaces cannot be used here. The message says why, as a sentence."""


class Network:
    """Namespaces by name, as `namespaces` made them."""

    def __init__(self, tag: str, names: Sequence[str]) -> None:
        self._tag = tag
        subnets = list(_NETS.subnets(new_prefix=24))
        self._subnet = subnets[os.getpid() % len(subnets)]
        self._numbers = {name: number for number, name in enumerate(names, start=11)}

    @property
    def bridge(self) -> str:
        """The bridge's name."""
        return f"{self._tag}br"

    def host(self, name: str) -> str:
        """Address of a member."""
        return str(self._subnet[self._numbers[name]])

    def prefix(self, name: str) -> list[str]:
        """What starts a command in a member's namespace."""
        return ["ip", "netns", "exec", self._space(name)]

    def cut(self, names: Sequence[str]) -> None:
        """These no longer reach one another."""
        for name in names:
            _call("bridge", "link", "set", "dev", self._port(name), "isolated", "on")

    def unplug(self, name: str) -> None:
        """Nobody reaches this one, and it reaches nobody."""
        _call("ip", "link", "set", self._port(name), "nomaster")

    def heal(self) -> None:
        """Everyone reaches everyone."""
        for name in self._numbers:
            _call("ip", "link", "set", self._port(name), "master", self.bridge)
            _call("bridge", "link", "set", "dev", self._port(name), "isolated", "off")

    def make(self) -> None:
        """The bridge and the namespaces. Raises NoNetwork."""
        _call("ip", "link", "add", self.bridge, "type", "bridge")
        _call("ip", "address", "add", f"{self._subnet[1]}/24", "dev", self.bridge)
        _call("ip", "link", "set", self.bridge, "up")
        for name in self._numbers:
            space, port = self._space(name), self._port(name)
            _call("ip", "netns", "add", space)
            _call("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _call("ip", "link", "set", port, "master", self.bridge, "up")
            _call("ip", "-n", space, "address", "add", f"{self.host(name)}/24", "dev", "eth0")
            _call("ip", "-n", space, "link", "set", "eth0", "up")
            _call("ip", "-n", space, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Whatever of it is there."""
        for name in self._numbers:
            subprocess.run(["ip", "link", "del", self._port(name)], check=False, capture_output=True, timeout=CALL_S)
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False, capture_output=True, timeout=CALL_S)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True, timeout=CALL_S)

    def reach(self) -> None:
        """One connection from member to member and one from the machine. Raises NoNetwork (a firewall on the bridge)."""
        first, *rest = self._numbers
        listen = f"import socket; s = socket.create_server(('{self.host(first)}', 7)); print(flush=True); s.accept(); s.accept()"
        dial = f"import socket; socket.create_connection(('{self.host(first)}', 7), {REACH_S})"
        server = subprocess.Popen([*self.prefix(first), "python3", "-c", listen], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            server.stdout.readline()
            socket.create_connection((self.host(first), 7), REACH_S).close()
            _call(*self.prefix(rest[0]), "python3", "-c", dial)
        except (OSError, subprocess.SubprocessError) as error:
            raise NoNetwork(f"members do not reach one another over a bridge here: {error}") from error
        finally:
            server.kill()
            server.wait()
            server.stdout.close()

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _port(self, name: str) -> str:
        return f"{self._tag}v{self._numbers[name]}"


@contextmanager
def namespaces(names: Sequence[str]) -> Iterator[Network]:
    """A namespace for each name. Raises NoNetwork where that is not possible."""
    if os.geteuid() != 0:
        raise NoNetwork("network namespaces need root")
    if shutil.which("ip") is None or shutil.which("bridge") is None:
        raise NoNetwork("the commands ip and bridge (iproute2) are not installed")
    _sweep(names)
    network = Network(f"tc{os.getpid()}", names)
    try:
        network.make()
        network.reach()
        yield network
    finally:
        network.remove()


def _sweep(names: Sequence[str]) -> None:
    """Remove what tests that were killed have left."""
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True, timeout=CALL_S).stdout
    for pid in set(re.findall(r"^tc(\d+)-", listed, re.MULTILINE)):
        if not os.path.exists(f"/proc/{pid}"):
            Network(f"tc{pid}", names).remove()


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=CALL_S)
    except subprocess.CalledProcessError as error:
        raise NoNetwork(f"{' '.join(command)}: {error.stderr.strip()}") from error

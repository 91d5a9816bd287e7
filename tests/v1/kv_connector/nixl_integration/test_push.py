# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Push mode on real NIXL: prefills that write into decoders which come and go."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from tests.support.fork_server import ForkServer
from tests.support.push_instance import LocalPush, RemotePush
from tests.support.waiting import SLACK_S, wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_peers import manager, policy

INTERVAL = 0.5
# The first heartbeat after a kill may still be taken.
RELEASE_S = 2 * INTERVAL + SLACK_S
CYCLES = 20
STRESS_S = 60.0
# Done as well before it ends, however slow the machine is.
STRESS_DOES = Counter({"writes": 100, "kills": 2, "freezes": 2})
STRESS_AT_MOST_S = 240.0
WRITER = "nixl-push-writer"

StartRemote = Callable[..., RemotePush]
MakeLocal = Callable[..., LocalPush]


@pytest.fixture
def start_remote(fork_server: ForkServer) -> Iterator[StartRemote]:
    """Starts an instance in a process: takes the arguments of `RemotePush`."""
    with contextlib.ExitStack() as stack:

        def start(engine_id: str, **arguments: object) -> RemotePush:
            remote = RemotePush(fork_server, engine_id, **arguments)
            return stack.enter_context(contextlib.closing(remote))

        yield start


@pytest.fixture
def make_local() -> Iterator[MakeLocal]:
    """Builds an instance in this process: takes the arguments of `LocalPush`."""
    with contextlib.ExitStack() as stack:

        def make(engine_id: str = "prefill", **arguments: object) -> LocalPush:
            local = LocalPush(engine_id, peer_heartbeat_interval=INTERVAL, **arguments)
            return stack.enter_context(contextlib.closing(local))

        yield make


def test_decoders_are_killed_and_replaced_under_two_prefills(
    start_remote: StartRemote, make_local: MakeLocal
):
    prefills = [make_local("p1"), make_local("p2")]
    survivor, port, took = start_remote("survivor"), None, []
    for cycle in range(CYCLES):
        victim = start_remote(f"d{cycle}", port=port)
        port = victim.port
        for prefill in prefills:
            prefill.push(victim, (2, 3))
            prefill.push(survivor, (4, 5))
            assert prefill.connected == {victim.engine_id, "survivor"}
        victim.child.kill()
        killed = time.monotonic()
        released: set[str] = set()

        def all_have_released(killed: float = killed, released: set[str] = released):
            for prefill in prefills:
                prefill.step()
                if prefill.connected == {"survivor"}:
                    if prefill.engine_id not in released:
                        took.append(time.monotonic() - killed)
                    released.add(prefill.engine_id)
            return len(released) == len(prefills)

        wait_until(all_have_released, RELEASE_S, prefills[0].evidence)
        for prefill in prefills:
            assert victim.engine_id not in prefill.worker.dst_xfer_side_handles
    print(f"{len(took)} releases, slowest {max(took):.2f} s after the kill")
    assert survivor.state()["failed"] == []
    assert all(prefill.agent.violations == [] for prefill in prefills)


def test_an_idle_prefill_releases_a_dead_decoder(
    start_remote: StartRemote, make_local: MakeLocal
):
    prefill, decoder = make_local(), start_remote("decoder")
    prefill.push(decoder)
    decoder.child.kill()
    took = prefill.wait_until(lambda: not prefill.connected, RELEASE_S, stepping=False)
    print(f"released after {took:.2f} s")
    assert prefill.agent.violations == []


def test_a_hung_decoder_is_suspect_until_it_goes_on(
    start_remote: StartRemote, make_local: MakeLocal, monkeypatch: pytest.MonkeyPatch
):
    for module in (policy, manager):
        monkeypatch.setattr(module, "SUSPECT_AFTER_S", 2.0)
    prefill = make_local()
    hung, healthy = start_remote("hung"), start_remote("healthy")
    for decoder in (hung, healthy):
        prefill.push(decoder)
    stuck, late = (prefill.register(hung, blocks) for blocks in ((2, 3), (4, 5)))
    pending = prefill.worker._pending_d_registrations
    prefill.wait_until(lambda: {stuck, late} <= pending.keys(), 10)
    hung.child.stop()

    prefill.has_prefilled(stuck, [2, 3])
    prefill.wait_until(lambda: prefill.peers()["hung"]["state"] == "suspect", 10)
    assert prefill.peers()["hung"]["in_flight_reads"] == 1
    prefill.has_prefilled(late, [4, 5])
    prefill.push(healthy, (2, 3))
    assert prefill.peers()["hung"]["in_flight_reads"] == 1
    assert prefill.connected == {"hung", "healthy"}

    hung.child.resume()
    prefill.wait_until(lambda: stuck in prefill.finished_sending, 10)
    prefill.check(hung, stuck, (2, 3))
    assert prefill.peers()["hung"]["state"] == "connected"
    prefill.push(hung, (6, 7))
    assert prefill.agent.violations == []


def reset_connections(pid: int) -> int:
    """Reset the TCP connections between this process and another; return how many."""
    count = 0
    for connection in psutil.Process(pid).net_connections("tcp"):
        if connection.status != psutil.CONN_ESTABLISHED:
            continue
        own = {
            c.laddr
            for c in psutil.Process().net_connections("tcp")
            if c.status == psutil.CONN_ESTABLISHED
        }
        if connection.raddr not in own:
            continue
        (source, sport), (target, dport) = connection.laddr, connection.raddr
        subprocess.run(
            ["ss", "-K", "-H", "-t", "src", source, "sport", "=", f":{sport}"]
            + ["dst", target, "dport", "=", f":{dport}"],
            check=True,
            capture_output=True,
        )
        count += 1
    return count


def why_no_resets() -> str | None:
    """Return why this machine lets us reset no connections, or None if it does."""
    if shutil.which("ss") is None or os.geteuid() != 0:
        return "resetting TCP connections needs root and the command ss"
    with socket.create_server((HOST := "127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)) as client:
            subprocess.run(
                ["ss", "-K", "-t", "dport", "=", f":{port}"], capture_output=True
            )
            try:
                client.send(b"x")
            except OSError:
                return None
    return "the kernel does not take ss -K (CONFIG_INET_DIAG_DESTROY)"


def test_a_reset_connection_heals(start_remote: StartRemote, make_local: MakeLocal):
    if reason := why_no_resets():
        pytest.skip(reason)
    prefill = make_local()
    decoder = start_remote("decoder", peer_heartbeat_interval=INTERVAL)
    prefill.push(decoder)
    assert reset_connections(decoder.child.pid) > 0
    # Both sides find out by themselves, and let go of each other.
    prefill.wait_until(lambda: not prefill.connected, RELEASE_S)
    prefill.wait_until(lambda: not decoder.state()["connected"], RELEASE_S)
    prefill.push(decoder, (2, 3))
    prefill.push(decoder, (4, 5))
    assert decoder.state()["failed"] == []
    assert prefill.agent.violations == []


def test_a_request_ends_when_its_prefill_is_gone(
    start_remote: StartRemote, make_local: MakeLocal
):
    """This instance decodes; stock waits for ever."""
    decoder = make_local("decoder")
    prefill = start_remote("prefill")
    own = (decoder.engine_id, decoder.port)
    decoder.expect("request", [0, 1], "prefill", prefill.port, own)
    decoder.wait_until(lambda: "prefill" in decoder.connected, 10)
    prefill.child.kill()
    decoder.wait_until(lambda: not decoder.connected, RELEASE_S)
    assert decoder.failed == []
    decoder.renew_lease("request", "prefill", prefill.port)
    took = decoder.wait_until(lambda: decoder.failed == ["request"], 10)
    print(f"ended {took:.2f} s after the lease heartbeat")
    assert decoder.agent.violations == []


class Stress:
    """A prefill and decoders that come and go."""

    def __init__(self, prefill: LocalPush, start_remote: StartRemote, seed: int):
        self._random = random.Random(seed)
        self._prefill = prefill
        self._start = start_remote
        self.done: Counter[str] = Counter()
        self._starter = ThreadPoolExecutor(1)
        self._starting: list[Future[RemotePush]] = []
        self.decoders = [self._new(None) for _ in range(3)]
        self._open: dict[str, tuple[RemotePush, list[int]]] = {}

    def _new(self, port: int | None) -> RemotePush:
        self.done["starts"] += 1
        return self._start(
            f"d{self.done['starts']}",
            port=port,
            num_blocks=64,
            peer_heartbeat_interval=INTERVAL,
        )

    def push(self) -> None:
        """Start a write; half of the time a registration comes late."""
        if len(self._open) >= 4:
            self.step()
            return
        decoder = self._random.choice(self.decoders)
        busy = {b for d, blocks in self._open.values() if d is decoder for b in blocks}
        free = [b for b in range(64) if b not in busy]
        blocks = self._random.sample(free, self._random.randint(1, 12))
        req_id = self._prefill.register(decoder, blocks)
        self._open[req_id] = decoder, blocks
        if self._random.random() < 0.5:
            self._prefill.step()
        self._prefill.has_prefilled(req_id, blocks)

    def step(self) -> None:
        """Take a step; check what it reports as written."""
        for future in [f for f in self._starting if f.done()]:
            self._starting.remove(future)
            self.decoders.append(future.result())
        self._prefill.step()
        # A check takes steps as well, so more may have finished by then.
        sent = self._prefill.finished_sending
        for req_id in [r for r in self._open if r in sent]:
            decoder, blocks = self._open.pop(req_id)
            if decoder.child.alive:
                self._prefill.check(decoder, req_id, blocks)
                self.done["writes"] += 1

    def kill(self) -> None:
        """Kill a decoder, with writes to it open or not; a replacement starts."""
        if self._starting:
            return
        victim = self.decoders.pop(self._random.randrange(len(self.decoders)))
        victim.child.kill()
        for req_id in [r for r, (d, _) in self._open.items() if d is victim]:
            del self._open[req_id]
            # The lease would end it.
            self._prefill.worker._reqs_to_send.pop(req_id, None)
            self._prefill.worker._reqs_to_process.discard(req_id)
        self._starting.append(self._starter.submit(self._new, victim.port))
        self.done["kills"] += 1

    def freeze(self) -> None:
        """Stop a decoder for a moment."""
        decoder = self._random.choice(self.decoders)
        decoder.child.stop()
        end = time.monotonic() + self._random.uniform(0.05, 0.5)
        while time.monotonic() < end:
            self._prefill.worker._push_writer_wake.set()
            time.sleep(0.005)
        decoder.child.resume()
        self.done["freezes"] += 1

    def idle(self) -> None:
        """Take no step for a while."""
        time.sleep(self._random.uniform(0.3, 1.2))
        self.done["idle phases"] += 1

    def close(self) -> None:
        """Wait for a decoder that still starts, so that its fixture ends it."""
        self._starter.shutdown()

    def run(self, seconds: float) -> None:
        """Do random things, for a while at least, then let all come to its end."""
        actions = {
            self.step: 60,
            self.push: 60,
            self.kill: 1,
            self.freeze: 2,
            self.idle: 2,
        }
        start = time.monotonic()
        while (took := time.monotonic() - start) < seconds or STRESS_DOES - self.done:
            assert took < STRESS_AT_MOST_S, f"{self.done}\n{self._prefill.evidence()}"
            (action,) = self._random.choices(list(actions), list(actions.values()))
            action()
        wait_until(
            lambda: not (self._open or self._starting),
            60,
            self._prefill.evidence,
            every=self.step,
        )
        for decoder in self.decoders:
            self._prefill.push(decoder)
        living = {decoder.engine_id for decoder in self.decoders}
        self._prefill.wait_until(lambda: self._prefill.connected == living, 30)


def test_everything_at_once(start_remote: StartRemote, make_local: MakeLocal):
    prefill = make_local(num_blocks=64, num_threads=4)
    with contextlib.closing(Stress(prefill, start_remote, seed=1)) as stress:
        stress.run(STRESS_S)

    print(dict(stress.done))
    assert prefill.agent.violations == []
    for decoder in stress.decoders:
        assert decoder.state()["violations"] == []
    sent = prefill.finished_sending
    assert len(sent) == len(set(sent))
    # The writer has fetched everything, whoever asked it to.
    assert set(prefill.agent.notifs) == {WRITER}

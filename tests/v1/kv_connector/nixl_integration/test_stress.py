# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Everything at once, for a minute, on real NIXL agents."""

import collections
import contextlib
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.support.peers import Decoder, Prefill

DURATION_S = 60.0
# Done as well before it ends, however slow the machine is.
DOES = collections.Counter(
    {"good reads": 100, "kills": 3, "freezes": 3, "idle phases": 3}
)
AT_MOST_S = 300.0
BLOCKS = 64
PREFILLS = 3
MAX_OPEN_READS = 4
MONITOR = "vllm-nixl-peer-monitor"

MakeDecoder = Callable[..., Decoder]
StartPrefill = Callable[..., Prefill]


@dataclass
class Read:
    prefill: Prefill
    blocks: list[int]
    local_blocks: list[int]


class Stress:
    """A decoder and prefills that come and go; every action leaves it consistent."""

    def __init__(self, decoder: Decoder, start_prefill: StartPrefill, seed: int):
        self.random = random.Random(seed)
        self.decoder = decoder
        self.done: collections.Counter[str] = collections.Counter()
        self._start_prefill = start_prefill
        self._starter = ThreadPoolExecutor(1)
        self._starting: list[Future[Prefill]] = []
        self.prefills = [self._new_prefill(None) for _ in range(PREFILLS)]
        self.killed: list[Prefill] = []
        self.reads: dict[str, Read] = {}

    def _new_prefill(self, port: int | None) -> Prefill:
        self.done["starts"] += 1
        return self._start_prefill(
            f"p{self.done['starts']}",
            port=port,
            num_blocks=BLOCKS,
            stepping=bool(self.done["starts"] % 2),
            num_threads=4,
            peer_heartbeat_interval=0.5,
        )

    # -- Actions ---------------------------------------------------------------

    def step(self) -> None:
        """Take a step; check what it reports."""
        decoder = self.decoder
        seen = len(decoder.finished), len(decoder.failed)
        decoder.step()
        for req_id in decoder.finished[seen[0] :]:
            read = self.reads.pop(req_id)
            decoder.check(read.prefill, read.blocks, read.local_blocks)
            self.done["good reads"] += 1
        for req_id in decoder.failed[seen[1] :]:
            read = self.reads.pop(req_id)
            assert read.prefill in self.killed, (
                f"{req_id} from a living prefill failed\n{decoder.evidence()}"
            )
            self.done["failed reads"] += 1
        for future in [f for f in self._starting if f.done()]:
            self._starting.remove(future)
            self.prefills.append(future.result())

    def read(self) -> None:
        """Start a read, now and then from a dead prefill, as a slow router would."""
        used = {b for read in self.reads.values() for b in read.local_blocks}
        free = sorted(set(range(BLOCKS)) - used)
        if len(self.reads) >= MAX_OPEN_READS or not free:
            return
        from_dead = self.killed and self.random.random() < 0.05
        prefill = self.random.choice(self.killed[-2:] if from_dead else self.prefills)
        count = self.random.randint(1, min(16, len(free)))
        read = Read(
            prefill,
            self.random.sample(range(BLOCKS), count),
            self.random.sample(free, count),
        )
        req_id = self.decoder.start(prefill, read.blocks, read.local_blocks)
        self.reads[req_id] = read
        if self.random.random() < 0.5:
            self.step()

    def idle(self) -> None:
        """Take no step for a while."""
        time.sleep(self.random.uniform(0.2, 1.5))
        self.done["idle phases"] += 1

    def kill(self) -> None:
        """Kill a prefill; a replacement starts while the others go on."""
        if len(self.prefills) < PREFILLS - 1 or self._starting:
            return
        target = self.prefills.pop(self.random.randrange(len(self.prefills)))
        target.kill()
        self.killed.append(target)
        self._starting.append(self._starter.submit(self._new_prefill, target.port))
        self.done["kills"] += 1

    def freeze(self) -> None:
        """Stop a prefill for a moment, with reads from it open or not."""
        prefill = self.random.choice(self.prefills)
        prefill.stop()
        end = time.monotonic() + self.random.uniform(0.05, 0.5)
        while time.monotonic() < end:
            self.step()
            time.sleep(0.005)
        prefill.resume()
        self.done["freezes"] += 1

    def change_pace(self) -> None:
        """Let a prefill idle, or step again."""
        prefill = self.random.choice(self.prefills)
        prefill.call("set_stepping", self.random.random() < 0.5)

    def run(self, seconds: float) -> None:
        """Do random things, for a while at least."""
        actions = {
            self.step: 200,
            self.read: 100,
            self.idle: 1,
            self.kill: 2,
            self.freeze: 1,
            self.change_pace: 2,
        }
        start = time.monotonic()
        while (took := time.monotonic() - start) < seconds or DOES - self.done:
            assert took < AT_MOST_S, f"{self.done}\n{self.decoder.evidence()}"
            (action,) = self.random.choices(list(actions), list(actions.values()))
            action()
            time.sleep(0.002)

    def settle(self) -> None:
        """Let all that is under way come to its end."""
        self.decoder_waits(lambda: not self._starting)
        self.decoder_waits(lambda: not self.reads)
        for prefill in self.prefills:
            self.decoder.read(prefill)
        living = {prefill.engine_id for prefill in self.prefills}
        self.decoder_waits(lambda: self.decoder.connected == living)

    def decoder_waits(self, condition: Callable[[], bool]) -> None:
        """Step until a condition holds."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, self.decoder.evidence()
            self.step()
            time.sleep(0.005)

    def close(self) -> None:
        """Wait for a prefill that still starts, so that its fixture ends it."""
        self._starter.shutdown()


@pytest.mark.parametrize("seed", [1])
def test_everything_at_once(
    make_decoder: MakeDecoder, start_prefill: StartPrefill, seed: int
):
    decoder = make_decoder(
        num_blocks=BLOCKS, num_threads=4, peer_heartbeat_interval=0.5
    )
    with contextlib.closing(Stress(decoder, start_prefill, seed)) as stress:
        stress.run(DURATION_S)
        stress.settle()

    print(dict(stress.done))
    assert decoder.agent.violations == []
    for prefill in stress.prefills:
        assert prefill.state()["violations"] == []
    reported = decoder.finished + decoder.failed
    assert len(reported) == len(set(reported))
    # It was everything: the monitor has worked as well.
    assert MONITOR in decoder.agent.notifs

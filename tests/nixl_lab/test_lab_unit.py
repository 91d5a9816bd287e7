# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The lab's parts that need no vLLM server."""

import asyncio
import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from nixl_lab import demo, faults, model
from nixl_lab.client import (
    Answer,
)
from nixl_lab.experiment import ExperimentError
from nixl_lab.in_server.lab_worker import LabWorkerExtension
from nixl_lab.record import Fault, p95
from nixl_lab.scenarios import judge_dead_route, release_line
from nixl_lab.servers import Deployment, ServerError, ServerOptions, VllmServer


def test_model_is_small_and_the_same_every_time(tmp_path: Path) -> None:
    first = model.ensure_model(tmp_path / "first")
    second = model.ensure_model(tmp_path / "second")
    assert _digests(first) == _digests(second)
    assert sum(f.stat().st_size for f in first.iterdir()) < 1_000_000


def test_model_is_made_once_and_again_after_an_interruption(tmp_path: Path) -> None:
    folder = model.ensure_model(tmp_path)
    made = (folder / "config.json").stat().st_mtime_ns
    assert model.ensure_model(tmp_path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made

    (folder / "complete").unlink()
    (folder / "model.safetensors").unlink()
    assert (model.ensure_model(tmp_path) / "model.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_tokenizer_takes_any_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.ensure_model(tmp_path))
    text = "two  blanks, an umlaut ü, a line\nand \N{SNOWMAN}"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def _digests(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.iterdir()
    }


class SleepingServer(VllmServer):
    """A server of two processes that only sleep."""

    def _command(self) -> list[str]:
        program = (
            "import subprocess as s; print('up', flush=True); s.run(['sleep','99'])"
        )
        return [sys.executable, "-c", program]


@pytest.fixture
def server(tmp_path: Path) -> Any:
    options = ServerOptions(tmp_path, tmp_path, start_timeout=0.5)
    server = SleepingServer("sleeper", "prefill", options)
    yield server
    server.kill_now()


async def _line(server: SleepingServer) -> str:
    async with asyncio.timeout(10):
        async for line in server.lines():
            return line
    raise AssertionError


async def test_kill_ends_the_whole_group(server: SleepingServer) -> None:
    server.spawn()
    assert await _line(server) == "up"
    members = list(server._members())
    assert len(members) >= 3
    await server.kill()
    assert not server.running
    assert not any(_alive(p) for p in members)


async def test_logs_of_each_start_are_kept_apart_and_read_as_one(
    server: SleepingServer,
) -> None:
    lines = server.lines()
    for start in (1, 2):
        server.spawn()
        assert await anext(lines) == "up"
        assert server.log_path.name == f"sleeper.{start}.log"
        await server.kill()


async def test_a_server_that_ends_while_starting_is_reported(
    server: SleepingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server, "_command", lambda: ["sh", "-c", "echo no luck; exit 3"]
    )
    server.spawn()
    with pytest.raises(ServerError, match="(?s)ended while starting.*no luck"):
        await server.wait_ready()


async def test_a_server_that_never_gets_ready_is_reported(
    server: SleepingServer,
) -> None:
    server.spawn()
    with pytest.raises(ServerError, match="not healthy after"):
        await server.wait_ready()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_the_process_that_started_it(
    tmp_path: Path, signum: signal.Signals
) -> None:
    program = textwrap.dedent(
        f"""
        import asyncio, signal, sys
        from pathlib import Path
        from nixl_lab.servers import Deployment, ServerOptions, VllmServer
        from nixl_lab.session import end_on_signals

        # Ignored where tests run in the background of a shell.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        VllmServer._command = lambda self: ["sleep", "99"]
        folder = Path({str(tmp_path)!r})

        async def main():
            end_on_signals()
            async with Deployment(ServerOptions(folder, folder)) as deployment:
                server = deployment.add("sleeper", "prefill")
                server.spawn()
                while len(list(server._members())) < 2:
                    await asyncio.sleep(0.01)
                print(*(p.pid for p in server._members()), flush=True)
                await asyncio.sleep(99)

        asyncio.run(main())
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as parent:
        assert parent.stdout is not None
        members = [psutil.Process(int(p)) for p in parent.stdout.readline().split()]
        assert members
        parent.send_signal(signum)
        parent.wait(timeout=10)
    deadline = time.monotonic() + 5
    while any(_alive(p) for p in members) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_alive(p) for p in members)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_stock_leaves_the_plugin_and_its_option_out(tmp_path: Path) -> None:
    options = ServerOptions(tmp_path, tmp_path, interval=1.5)
    ours = VllmServer("a", "decode", options)
    stock = VllmServer("b", "decode", dataclasses.replace(options, stock=True))
    assert '"peer_heartbeat_interval": 1.5' in ours._command()[-1]
    assert "peer_heartbeat_interval" not in stock._command()[-1]
    assert "nixl_heartbeat" in ours._environment()["VLLM_PLUGINS"]
    assert stock._environment()["VLLM_PLUGINS"] == ""


def test_a_server_runs_the_release_that_it_is_told(tmp_path: Path) -> None:
    options = ServerOptions(tmp_path, tmp_path, vllm="0.33.0")
    path = VllmServer("a", "decode", options)._environment()["PYTHONPATH"]
    assert path.split(os.pathsep)[0] == f"{sys.prefix}/server-0.33.0"


def test_reset_connection_or_a_reason_why_not() -> None:
    reason = faults.why_no_resets()
    assert reason is None or any(
        word in reason for word in ("iproute2", "root", "CONFIG_INET_DIAG_DESTROY")
    )


def test_release_line() -> None:
    fault = Fault("kill", ["p"], 0.0, releases={"d1": 1.234, "d2": 1.0})
    assert release_line(fault) == "released in 1.2 s"
    fault.releases["d2"] = None
    assert release_line(fault) == "never released within 20 s"


def test_judge_dead_route_allows_one_slow_failure() -> None:
    def failed(seconds: float) -> Answer:
        return Answer("p", seconds, error="HTTP 500")

    healthy = [Answer("p", 0.1, (1,)) for _ in range(40)]
    slower = [Answer("p", 0.2, (1,)) for _ in range(40)]
    quick = [failed(0.01)] * 20
    assert "1.00x" in judge_dead_route([failed(5.0), *quick], healthy, healthy)
    with pytest.raises(ExperimentError, match="2 took 1 s or longer"):
        judge_dead_route([failed(5.0), failed(5.0), *quick], healthy, healthy)
    with pytest.raises(ExperimentError, match="2.00x"):
        judge_dead_route(quick, healthy, slower)
    with pytest.raises(ExperimentError, match="was answered"):
        judge_dead_route([*quick, healthy[0]], healthy, healthy)


def test_p95() -> None:
    assert p95([float(n) for n in range(1, 101)]) == pytest.approx(95.05)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_demo_refuses_a_senseless_interval(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        demo.parse_args([f"--interval={text}"])
    assert "not a positive number" in capsys.readouterr().err


async def test_a_failed_start_ends_the_whole_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(server: VllmServer) -> list[str]:
        return ["sleep", "99"] if server.name == "good" else ["false"]

    monkeypatch.setattr(VllmServer, "_command", command)
    with pytest.raises(ServerError, match="bad ended while starting"):
        async with Deployment(ServerOptions(tmp_path, tmp_path)) as deployment:
            good = deployment.add("good", "prefill")
            deployment.add("bad", "decode")
            await deployment.start_all()
    assert not good.running


def test_a_crash_is_summed_up_by_its_first_errors_and_its_last(tmp_path: Path) -> None:
    server = VllmServer("a", "decode", ServerOptions(tmp_path, tmp_path))
    server.starts = 1
    errors = [f"ERROR {number} {'x' * 200}" for number in range(30)]
    server.log_path.write_text("\n".join(["INFO fine", *errors, "INFO end", ""]))
    heading, *lines = server.crash_summary().splitlines()
    assert heading == f"a, exit status None; {server.log_path}:"
    assert [line.split()[1] if " " in line else line for line in lines] == [
        *map(str, range(6)),
        "...",
        *map(str, range(24, 30)),
    ]
    assert max(map(len, lines)) == 150


def test_demo_fails_with_the_relevant_log_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = "echo chatter; echo ERROR: no memory left; exit 1"
    monkeypatch.setattr(VllmServer, "_command", lambda _: ["sh", "-c", script])
    status = demo.main([f"--cache={tmp_path}", f"--output={tmp_path / 'out'}"])
    shown = capsys.readouterr()
    assert status == 1
    assert "FAILED  start prefill-1, prefill-2, decode-1" in shown.out
    assert "ERROR: no memory left" in shown.err
    assert "ended while starting" in shown.err
    assert "released" not in shown.out


def test_demo_says_why_it_skips_a_scenario(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults.shutil, "which", lambda _: None)
    assert demo.main(["--scenario=flap"]) == 0
    assert "skipped: the command ss is missing" in capsys.readouterr().out


def test_a_busy_interpreter_lets_no_other_thread_run() -> None:
    stop = threading.Event()
    gaps = [0.0]

    def tick() -> None:
        last = time.monotonic()
        while not stop.is_set():
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    LabWorkerExtension().hold_interpreter(1)
    stop.set()
    thread.join()
    assert max(gaps) > 0.9

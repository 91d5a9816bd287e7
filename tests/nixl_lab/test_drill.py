# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Drill, demo and soak from their command lines to their reports, with fake servers."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nixl_lab import drill
from nixl_lab.instances import CommandInstance, Commands, InstanceError
from nixl_lab.record import DRILL_RULES, Record, judge
from nixl_lab.servers import free_port

HERE = Path(__file__).parent
OWN = [
    *("--prefill=p1=http://h:1", "--prefill=p2=http://h:2"),
    *("--decode=d1=http://h:3", "--decode=d2=http://h:4"),
    *("--kill=k", "--start=s"),
]


@contextmanager
def playing(
    output: Path, flaw: str, *arguments: str, what: str = "drill"
) -> Iterator[subprocess.Popen]:
    """A command in a process of its own; fails the test if it leaves any behind."""
    mark = {"LAB_TEST": str(output)}
    command = [sys.executable, str(HERE / "lab_with_fakes.py"), what, flaw]
    with subprocess.Popen(
        [*command, f"--output={output}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **mark, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as process:
        try:
            yield process
            process.wait(timeout=60)
        finally:
            process.kill()
    left = [p for p in psutil.process_iter() if _has(p, mark)]
    for each in left:
        each.kill()
    assert not left


def _has(process: psutil.Process, mark: dict[str, str]) -> bool:
    try:
        environ = process.environ()
    except psutil.Error:
        return False
    alive = process.status() != psutil.STATUS_ZOMBIE
    return alive and mark.items() <= environ.items()


def run(
    output: Path, flaw: str = "", *arguments: str, what: str = "drill"
) -> tuple[int, str, Record]:
    with playing(output, flaw, *arguments, what=what) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    return process.returncode, said, Record.read(output / "record.json")


def failed_rules(record: Record) -> list[str]:
    return [rule.text for rule in judge(record, DRILL_RULES) if not rule.passed]


def test_a_drill_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    status, said, record = run(tmp_path, "", "--cycles=2")
    assert status == 0, said
    hit = [fault.instances for fault in record.faults]
    assert hit == [["prefill-2"], ["prefill-2"], ["decode-2"]]
    times = record.release_times()
    assert len(times) == 4
    assert all(t is not None and 0 < t < 2 for t in times)
    pairs = {(r.prefill, r.decode) for r in record.requests if not r.error}
    assert len(pairs) == 4
    assert "cycle 2 of 2" in said
    assert "requests/s" in said
    assert (tmp_path / "README.md").read_text().startswith("# Passed")


def test_a_demo_is_a_drill_of_one_cycle(tmp_path: Path) -> None:
    status, said, record = run(tmp_path, what="demo")
    assert status == 0, said
    assert re.fullmatch(r"released in \d+\.\d s", said.splitlines()[-1])
    assert [fault.instances for fault in record.faults] == [["prefill-2"]]


def test_a_decoder_that_keeps_a_dead_prefill_fails_the_drill(tmp_path: Path) -> None:
    status, said, record = run(tmp_path, "keeps", "--cycles=1", "--interval=0.1")
    assert status == 1, said
    assert "decode-1: not released in time" in said
    assert [rule[:21] for rule in failed_rules(record)] == ["Each decoder releases"]
    assert "FAIL  Each decoder releases" in said


def test_a_connector_without_a_list_of_peers_is_judged_by_its_log(
    tmp_path: Path,
) -> None:
    status, said, record = run(tmp_path, "stock", "--cycles=1")
    assert status == 0, said
    assert record.release_times() == [pytest.approx(1, abs=1)] * 2


def test_unexpected_errors_fail_the_drill(tmp_path: Path) -> None:
    status, said, record = run(tmp_path, "logs", "--cycles=1")
    assert status == 1, said
    assert sorted(record.log_errors) == [f"decode-{n}: CUDA error #" for n in (1, 2)]
    assert len(failed_rules(record)) == 1


def test_wrong_tokens_fail_the_drill(tmp_path: Path) -> None:
    with playing(tmp_path, "wrong", "--cycles=1") as process:
        said = _wait_for(process, "answers through")
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
    record = Record.read(tmp_path / "record.json")
    assert record.causes().keys() == {"NO CAUSE: wrong tokens"}, said
    assert "Every answer has the reference's tokens." in failed_rules(record)


@pytest.mark.parametrize(
    ("at", "signum"),
    [
        ("start prefill-1", signal.SIGINT),
        ("answers through", signal.SIGTERM),
        ("watch the decoders", signal.SIGINT),
        ("start a replacement", signal.SIGTERM),
    ],
)
def test_an_interrupt_leaves_a_report_and_nothing_else(
    tmp_path: Path, at: str, signum: signal.Signals
) -> None:
    with playing(tmp_path, "keeps", "--cycles=1") as process:
        said = _wait_for(process, f"...     {at}")
        process.send_signal(signum)
        process.send_signal(signum)
        assert process.stdout is not None
        said += process.stdout.read()
    assert process.returncode == 130, said
    record = Record.read(tmp_path / "record.json")
    assert record.stopped == "interrupted"
    assert "# Failed, incomplete" in (tmp_path / "README.md").read_text()


def test_an_instance_that_exits_ends_the_drill(tmp_path: Path) -> None:
    with playing(tmp_path, "keeps", "--cycles=1") as process:
        said = _wait_for(process, "watch the decoders")
        log = str(tmp_path / "logs" / "decode-1.1.log")
        target = next(
            p
            for p in psutil.Process(process.pid).children(recursive=True)
            if os.readlink(f"/proc/{p.pid}/fd/1") == log
        )
        target.kill()
        assert process.stdout is not None
        said += process.stdout.read()
    assert process.returncode == 1, said
    record = Record.read(tmp_path / "record.json")
    assert record.exits == ["decode-1"]
    assert "No instance exits that nobody killed." in failed_rules(record)
    assert "decode-1 is gone" in record.stopped
    assert "decode-1, exit status -9;" in said


def _wait_for(process: subprocess.Popen, text: str) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"no {text!r} in\n{said}")


def test_a_seed_gives_the_same_faults_again(tmp_path: Path) -> None:
    plans = []
    for folder in (tmp_path / "1", tmp_path / "2"):
        status, said, record = run(folder, "", "--minutes=0.2", "--seed=7", what="soak")
        assert status == 0, said
        assert "seed 7" in said
        assert record.usage.keys() == {*record.prefills, *record.decoders}
        plans.append([(fault.kind, fault.instances) for fault in record.faults])
    count = min(map(len, plans))
    assert count > 3
    assert plans[0][:count] == plans[1][:count]


def test_a_soak_finds_what_is_never_released(tmp_path: Path) -> None:
    arguments = ("--minutes=0.2", "--seed=7", "--interval=0.1")
    status, said, _ = run(tmp_path, "keeps", *arguments, what="soak")
    assert status == 1
    assert "FAIL  Each decoder releases a dead prefill within" in said


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    """Commands for a fake server per instance, its log in a file."""
    start = f'"{sys.executable}" "{HERE / "fake_vllm.py"}" "${{URL##*:}}"'
    return Commands(
        kill=f'kill -9 "$(cat "{tmp_path}/$INSTANCE.pid")"',
        start=f'{start} >>"{tmp_path}/$INSTANCE.log" 2>&1 &'
        f' echo $! >"{tmp_path}/$INSTANCE.pid"',
        logs=f'tail -n 0 -F "{tmp_path}/$INSTANCE.log"',
        output=tmp_path / "commands.log",
    )


async def test_commands_kill_start_and_follow(
    tmp_path: Path, commands: Commands
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    instance = CommandInstance("d1", "decode", url, commands)
    (tmp_path / "d1.log").write_text("from before the drill\n")
    lines: list[str] = []

    async def follow() -> None:
        async for line in instance.lines():
            lines.append(line)

    following = asyncio.create_task(follow())
    try:
        assert not await instance.alive()
        async with asyncio.timeout(20):
            await instance.start()
        assert await instance.alive()
        async with asyncio.timeout(10):
            while not any("serving" in line for line in lines):
                await asyncio.sleep(0.02)
        assert not any("before" in line for line in lines)
        await instance.kill()
        assert not await instance.alive()
    finally:
        following.cancel()
        await asyncio.wait([following])
        subprocess.run(["sh", "-c", commands.kill], env={"INSTANCE": "d1"}, stderr=-3)


async def test_a_command_that_fails_is_reported(tmp_path: Path) -> None:
    commands = Commands("exit 3", "echo no luck; false", "", tmp_path / "log")
    instance = CommandInstance("p2", "prefill", "http://127.0.0.1:1", commands)
    with pytest.raises(InstanceError, match="kill command for p2 ended with 3"):
        await instance.kill()
    with pytest.raises(InstanceError, match="start command for p2 ended with 1"):
        await instance.start()
    assert "no luck" in (tmp_path / "log").read_text()


def test_a_deployment_of_one_s_own(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an API key, no logs, and a prefill that comes back elsewhere."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    names = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
    urls = {name: f"http://127.0.0.1:{free_port()}" for name in names}
    arguments = [f"--{role}={name}={urls[name]}" for name, role in names.items()]
    elsewhere = f"http://127.0.0.1:{free_port()}"
    start = (
        f'if [ "$INSTANCE" = p2 ]; then URL={elsewhere}; fi\n'
        f"{commands.start}\necho $URL"
    )
    arguments += [f"--kill={commands.kill}", f"--start={start}"]
    try:
        for name in names:
            (tmp_path / f"{name}.log").touch()
            environment = {**os.environ, "INSTANCE": name, "URL": urls[name]}
            subprocess.run(commands.start, shell=True, env=environment, check=True)
        _await_serving(tmp_path, names)
        command = [sys.executable, str(HERE / "lab_with_fakes.py"), "drill", ""]
        command += [f"--output={tmp_path / 'out'}", "--cycles=1", *arguments]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for name in names:
            environment = {**os.environ, "INSTANCE": name}
            subprocess.run(commands.kill, shell=True, env=environment, stderr=-3)
    record = Record.read(tmp_path / "out" / "record.json")
    assert record.about["vLLM"] == "0.0.0"
    assert [fault.instances for fault in record.faults] == [["p2"], ["d2"]]
    assert all(record.release_times())


def _await_serving(folder: Path, names: dict[str, str]) -> None:
    deadline = time.monotonic() + 20
    while not all("serving" in (folder / f"{n}.log").read_text() for n in names):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--cycles=0"], "--cycles: '0' is not a whole number from 1"),
        (["--cycles=x"], "--cycles: 'x' is not a whole number from 1"),
        (["--interval=nan"], "--interval: 'nan' is not a positive number of seconds"),
        (["--prefill=http://h"], "--prefill: 'http://h' is not NAME=URL"),
        (["--prefill=p1=h:1"], "--prefill: 'p1=h:1' is not NAME=URL"),
        (OWN[1:], "--prefill is needed at least twice"),
        ([*OWN, "--decode=p1=http://h:5"], "p1 is named twice"),
        (OWN[:-1], "--start is needed with --prefill and --decode"),
        ([*OWN, "--stock"], "--stock, --vllm, --router are for servers that"),
        (OWN[4:], "--kill, --start and --logs need --prefill and --decode"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        drill.parse_args(arguments)
    assert complaint in capsys.readouterr().err

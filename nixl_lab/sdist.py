# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fetches vLLM's source distributions, which carry what its wheels leave out.

``pip download --no-binary vllm`` fetches one too, but goes on to build its
metadata and stops at the local suffix of the version it finds. Here pip only
looks the archive up, with the user's own configuration (indexes, proxies,
credentials), and downloads it.
"""

import contextlib
import hashlib
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any


class SdistError(RuntimeError):
    """A source distribution could not be had or is not what it claims to be."""


@contextlib.contextmanager
def _pip_session_and_finder() -> Iterator[tuple[Any, Any]]:
    """Yield pip's HTTP session and package finder, configured as pip would be.

    pip has no public interface for either: everything that a new pip could
    break is in this function.
    """
    from pip._internal.commands import create_command

    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-binary", "vllm", "--no-deps"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(
            options=options, session=session, ignore_requires_python=True
        )
        yield session, finder


def fetch(version: str, cache: Path) -> Path:
    """Return the path of vLLM's source archive, downloading it at most once.

    Args:
        version: vLLM's release, for example ``0.33.0``.
        cache: directory that keeps the archives.

    Raises:
        SdistError: the release has no source archive, it cannot be
            downloaded, or its hash is not the index's.
    """
    archive = cache / f"vllm-{version}.tar.gz"
    if archive.exists():
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with _pip_session_and_finder() as (session, finder):
            links = [
                candidate.link
                for candidate in finder.find_all_candidates("vllm")
                if str(candidate.version) == version
                and candidate.link.filename.endswith(".tar.gz")
            ]
            if not links:
                raise SdistError("pip's indexes list no source archive of it")
            _download(session, links[0], archive)
    # pip and its HTTP library raise many types; all of them mean the same here.
    except Exception as error:
        raise SdistError(
            f"cannot fetch the source distribution of vllm {version}: {error}"
        ) from error
    return archive


def _download(session: Any, link: Any, archive: Path) -> None:
    if link.hash_name is None:
        raise SdistError(f"the index gives no hash for {link.filename}")
    response = session.get(
        link.url_without_fragment,
        # Else a server's gzip encoding would be undone and the hash would differ.
        headers={"Accept-Encoding": "identity"},
        stream=True,
    )
    response.raise_for_status()
    digest = hashlib.new(link.hash_name)
    partial = archive.with_suffix(".partial")
    with partial.open("wb") as file:
        for chunk in response.iter_content(1 << 20):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != link.hash:
        partial.unlink()
        raise SdistError(f"the hash of {link.filename} is not the index's")
    partial.replace(archive)


def read(
    archive: Path, wanted: Callable[[PurePosixPath], bool]
) -> dict[PurePosixPath, bytes]:
    """Return the files of an archive for which ``wanted`` is true.

    Args:
        archive: a source archive from `fetch`.
        wanted: decides on a path relative to the archive's root.
    """
    files = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if wanted(path) and (file := tar.extractfile(member)) is not None:
                files[path] = file.read()
    return files


def write(files: dict[PurePosixPath, bytes], root: Path) -> None:
    """Write files from `read` under a directory."""
    for path, content in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

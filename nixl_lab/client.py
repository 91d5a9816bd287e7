# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Requests to vLLM servers and routers, with what a check needs of the answers."""

import os
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

PREFILL_HEADER = "X-Prefill-Instance"
DECODE_HEADER = "X-Decode-Instance"
REQUEST_ID_HEADER = "X-Request-Id"
_TIMEOUT = aiohttp.ClientTimeout(total=60)
_ASK_FOR_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

PEERS_PATH = "/v1/nixl/peers"

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """The outcome of one request; `error` is empty when it succeeded."""

    prompt: str
    seconds: float
    tokens: Tokens = ()
    prefill: str = ""
    decode: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


def new_session() -> aiohttp.ClientSession:
    """A session that has the servers' API key, if `VLLM_API_KEY` is set."""
    key = os.environ.get("VLLM_API_KEY")
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else None
    )


def make_prompts(count: int, length: int = 200) -> list[str]:
    """Prompts that differ from their first byte on, each over more than one block."""
    seed = "the decoder reads these blocks out of the memory of a prefill instance "
    return [
        f"{index:03d} {seed * (length // len(seed) + 1)}"[:length]
        for index in range(count)
    ]


def completion_body(prompt: str, max_tokens: int = 16) -> dict[str, Any]:
    """A greedy completion of a fixed length that returns token ids."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        # A deployment that caches prefixes must transfer the blocks all the same.
        "cache_salt": uuid.uuid4().hex,
    }


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a prefill instance gets of a request that another instance decodes."""
    body = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
    return {**body, "max_tokens": 1, "kv_transfer_params": _ASK_FOR_REMOTE_DECODE}


def kv_params_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Where the blocks of a prefilled request are, as its prefill instance says."""
    return answer["kv_transfer_params"]


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    *,
    prefill: str | None = None,
    decode: str | None = None,
    kv_params: Mapping[str, Any] | None = None,
) -> Answer:
    """Sends one completion to a server or to the proxy; never raises for a failure.

    Args:
        session: The session to send with.
        url: The server or proxy.
        prompt: The prompt.
        prefill: Name of the prefill instance that the proxy has to use.
        decode: Name of the decode instance that the proxy has to use.
        kv_params: Where to read the prompt's blocks, for a decode instance.
    """
    body = completion_body(prompt)
    if kv_params is not None:
        body["kv_transfer_params"] = dict(kv_params)
    pinned = {PREFILL_HEADER: prefill, DECODE_HEADER: decode}
    headers = {name: value for name, value in pinned.items() if value}
    by_prefill = by_decode = error = ""
    tokens: Tokens = ()
    start = time.monotonic()
    try:
        async with session.post(
            f"{url}/v1/completions", json=body, headers=headers, timeout=_TIMEOUT
        ) as response:
            by_prefill = response.headers.get(PREFILL_HEADER, "")
            by_decode = response.headers.get(DECODE_HEADER, "")
            text = await response.text()
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {text[:200]}")
            tokens = tuple((await response.json())["choices"][0]["token_ids"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as problem:
        error = str(problem) or repr(problem)
    seconds = time.monotonic() - start
    return Answer(prompt, seconds, tokens, by_prefill, by_decode, error)


async def prefill_only(
    session: aiohttp.ClientSession, url: str, prompt: str
) -> dict[str, Any]:
    """Has a prefill instance compute a prompt's blocks; returns where they are."""
    body = prefill_body(completion_body(prompt))
    async with session.post(
        f"{url}/v1/completions", json=body, timeout=_TIMEOUT
    ) as response:
        response.raise_for_status()
        return kv_params_of(await response.json())


async def connected_engines(session: aiohttp.ClientSession, url: str) -> set[str]:
    """The engines that any rank of an instance is connected to, as it says itself.

    Raises:
        aiohttp.ClientError: it does not say; a 404 means that it has no such list.
    """
    async with session.get(url + PEERS_PATH, timeout=_TIMEOUT) as response:
        response.raise_for_status()
        ranks = (await response.json())["ranks"]
    return {peer["engine_id"] for rank in ranks for peer in rank["peers"]}


async def reference_tokens(
    session: aiohttp.ClientSession, url: str, prompts: Iterable[str]
) -> dict[str, Tokens]:
    """The tokens that one instance alone produces for each prompt."""
    reference = {}
    for prompt in prompts:
        answer = await complete(session, url, prompt)
        if not answer.ok:
            raise RuntimeError(f"no reference for {prompt!r}: {answer.error}")
        reference[prompt] = answer.tokens
    return reference

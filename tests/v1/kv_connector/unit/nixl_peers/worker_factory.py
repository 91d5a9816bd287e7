# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds the real connector worker in a plain process, without a model or a GPU."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LAYERS = 2
KV_HEADS = 4
HEAD_DIM = 32
BLOCK_SIZE = 32
# Where KV caches are; "cuda" in the check on a GPU.
DEVICE = "cpu"


def _model_dir() -> str:
    """Write the configuration of a tiny Llama; no weights are ever loaded."""
    path = Path(tempfile.mkdtemp(prefix="nixl-test-model-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4 * HEAD_DIM,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 1024,
        "vocab_size": 512,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


_MODEL_DIR: str | None = None


def make_vllm_config(
    engine_id: str,
    role: str = "kv_consumer",
    kv_connector: str = "NixlConnector",
    **extra: Any,
) -> Any:
    """Return a vLLM configuration with a NIXL connector.

    Args:
        engine_id: Id of the engine.
        role: ``kv_role`` of the engine.
        kv_connector: Name of the connector.
        **extra: Keys of ``kv_connector_extra_config``.

    """
    global _MODEL_DIR
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    _MODEL_DIR = _MODEL_DIR or _model_dir()
    args = EngineArgs(
        model=_MODEL_DIR,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        kv_transfer_config=KVTransferConfig(
            kv_connector=kv_connector,
            kv_role=role,
            engine_id=engine_id,
            kv_buffer_device=DEVICE,
            kv_connector_extra_config={"num_threads": 0, **extra},
        ),
    )
    config = args.create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def init_world() -> None:
    """Make this process a distributed world of one."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    fd, store = tempfile.mkstemp(prefix="nixl-test-store-")
    os.close(fd)
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{store}",
        backend="gloo",
    )
    parallel_state.initialize_model_parallel(1, 1)


def make_kv_cache_config(num_blocks: int) -> Any:
    """Return a KV cache of ``num_blocks`` blocks for every layer."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_DIM,
        dtype=torch.float32,
    )
    names = layer_names()
    page = spec.page_size_bytes
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=page * num_blocks * LAYERS,
                layers=names,
                layer_stride=page * num_blocks,
                block_stride=page,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )


def layer_names() -> list[str]:
    """Return the names of the model's attention layers."""
    return [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]


def make_kv_caches(num_blocks: int, fill: float = 0.0) -> dict[str, torch.Tensor]:
    """Return one KV cache tensor per layer, filled with one value."""
    shape = (num_blocks, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    return {name: torch.full(shape, fill, device=DEVICE) for name in layer_names()}


def make_connector(
    engine_id: str,
    num_blocks: int = 8,
    role: str = "kv_consumer",
    connector_cls: Any = None,
    kv_caches: dict[str, torch.Tensor] | None = None,
    **extra: Any,
) -> Any:
    """Build the worker side of a connector and register a KV cache with it.

    Args:
        engine_id: Id of the engine.
        num_blocks: Blocks in its KV cache.
        role: ``kv_role`` of the engine.
        connector_cls: The connector class; ours by default.
        kv_caches: The KV cache to register; zeros by default.
        **extra: Keys of ``kv_connector_extra_config``.

    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import (
        NixlConnector,
    )

    config = make_vllm_config(engine_id, role, **extra)
    with set_current_vllm_config(config):
        init_world()
        connector = (connector_cls or NixlConnector)(
            config, KVConnectorRole.WORKER, make_kv_cache_config(num_blocks)
        )
        connector.register_kv_caches(kv_caches or make_kv_caches(num_blocks))
    return connector


def per_engine_state(worker: Any) -> tuple[Any, ...]:
    """Return all that a worker keeps by engine id: nothing may outlive a release."""
    return (
        worker._remote_agents,
        worker.dst_xfer_side_handles,
        worker.kv_caches_base_addr,
        worker.dst_num_blocks,
        worker.tp_mappings,
        worker._engine_clock_offset,
        worker._engine_last_active,
        worker._peers,
    )

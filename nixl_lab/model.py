# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A tiny Llama with a byte-level tokenizer, made on the spot: no hub is needed."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MODEL_NAME = "tiny-llama"
SEED = 20240229
_SPECIAL_TOKENS = ["<s>", "</s>"]
# Written last, so a folder without it is the rest of an interrupted run.
_COMPLETE_MARK = "complete"


def ensure_model(cache: Path | None = None) -> Path:
    """Returns the model's folder, making it if it is not there.

    Args:
        cache: Where to keep it; the user's cache folder by default.
    """
    cache_dir = (cache or _default_cache()).resolve()
    # Named after this file's content: a changed recipe never meets an old model.
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    folder = cache_dir / f"{MODEL_NAME}-{recipe[:12]}"
    if (folder / _COMPLETE_MARK).exists():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=MODEL_NAME, dir=cache_dir))
    try:
        write_model(scratch)
        (scratch / _COMPLETE_MARK).touch()
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "nixl-lab"


def write_model(folder: Path) -> None:
    """Writes weights, configuration and tokenizer to `folder`."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = _make_tokenizer()
    _make_network(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_tokenizer() -> "PreTrainedTokenizerFast":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Every byte is a token and there are no merges, so any text has an encoding.
    symbols = _SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=_SPECIAL_TOKENS[0],
        eos_token=_SPECIAL_TOKENS[1],
        model_max_length=1024,
    )


def _make_network(vocab_size: int) -> "LlamaForCausalLM":
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        # Far wider than for training: with the usual 0.02 the output hardly
        # depends on the prompt, and a lost KV block would go unnoticed.
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return LlamaForCausalLM(config).bfloat16()

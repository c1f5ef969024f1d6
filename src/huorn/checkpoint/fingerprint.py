"""Which model a recording or a predictor belongs to: one number for the weights that decide its routing."""

from __future__ import annotations

import hashlib
import json

import torch

from huorn.checkpoint.reader import Checkpoint

# What does not change a hidden state: when an answer ends, and where the numbers came from.
_LEFT_OUT = {"eos_token_ids", "synthetic"}


def model_fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 in hex of config, embedding and every layer's router, bytes as stored.

    The same however the weights are spread over shards and spelled in them; a fine-tune that moved one bit of one router differs.
    Reads the embedding (1.0 GB in the 35B shape) 8 MB at a time. Raises CheckpointError when it can not be read.
    """
    config = checkpoint.config
    shape = json.dumps(config.model_dump(mode="json", exclude=_LEFT_OUT), sort_keys=True)
    digest = hashlib.sha256(b"huorn model v1\n" + shape.encode())
    routers = [f"layers.{layer}.mlp.gate.weight" for layer in range(config.num_hidden_layers)]
    for name in ("embed_tokens.weight", *routers):
        digest.update(f"\n{name} {checkpoint.stored_dtype(name)}\n".encode())
        for _, piece in checkpoint.row_table(name).pieces():
            digest.update(piece.view(torch.uint8).numpy().data)
    return digest.hexdigest()

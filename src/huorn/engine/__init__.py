"""Requests: from a prompt to streamed text (tokenizer, chat template, sampling, decode loop)."""

"""A bank as a folder that works without huorn: export, gate, manifest, card, and verifying all of it again."""
